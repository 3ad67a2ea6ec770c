"""What a run will need, found without a GPU.

`step` trains on fake tensors of the CPU, alone or as a rank of a group that does not exist, while `counts` has the
memory, the FLOPs and the collectives. `machines` knows what cards and machines have and which batch sizes fit them;
`report` writes it all for a dry run, and one sentence for an error.
"""
