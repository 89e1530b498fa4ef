"""Layers that know no mesh: attention, linear maps and norms, vocabulary, and the context of a forward pass."""
