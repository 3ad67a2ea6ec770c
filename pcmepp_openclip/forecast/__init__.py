"""What a run will need, found without a GPU: `fake_cuda` runs a training step on CUDA tensors that hold no numbers."""
