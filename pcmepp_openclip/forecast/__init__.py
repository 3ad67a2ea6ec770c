"""A forecast of the memory, time and traffic of a run, made without a GPU.

`step` trains on fake tensors of the CPU, alone or as a rank of a group that does not exist, while `counts` counts the
memory, the FLOPs and the collectives. `machines` knows what cards and machines have and which batch sizes fit them.
`report` writes the rows of a dry run, and one sentence for an error.
"""
