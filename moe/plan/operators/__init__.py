"""Shards each operator of a model, by annotations of tensors (GSPMD) or by names of dims (Mesh-TensorFlow)."""
