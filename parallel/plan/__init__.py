"""Plans without tensors: model states in bytes, layers cut into stages."""
