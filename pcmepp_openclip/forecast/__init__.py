"""What a run will need, found without a GPU: `fake_cuda` makes CUDA tensors that hold no numbers, `fake_ranks` a group
of ranks, and `attention` the kernels of a card; on them `step` trains, `live_bytes` and `traffic` count, and `memory`
has the peak of a rank."""
