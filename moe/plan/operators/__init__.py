"""Shardings of single operators: a model's graph, GSPMD, Mesh-TensorFlow."""
