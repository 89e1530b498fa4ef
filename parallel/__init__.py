"""Parallel training of any PyTorch model: meshes of ranks, collectives, tensor, data and pipeline parallelism. It never imports `moe`."""
