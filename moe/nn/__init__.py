"""Layers that do not depend on the device mesh: attention, linear maps and norms, vocabulary, and the context of a forward pass."""
