"""Plans made without tensors: model states in bytes, and layers cut into stages."""
