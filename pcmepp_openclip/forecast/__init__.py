"""What a run will need, found without a GPU.

`fake_cuda` makes CUDA tensors that hold no numbers, `fake_ranks` a group of ranks, and `attention` the kernels of a
card. On them `step` trains while `live_bytes`, `flops`, `wire` and `traffic` count, and `memory` has the peak of a
rank. `batch_sizes` finds those that fit; `cards` and `hosts` know what machines have; `report` writes
it all for a dry run, and `line` one sentence for an error.
"""
