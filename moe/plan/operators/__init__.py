"""Shardings of a model's single operators, annotated as in GSPMD or named as in Mesh-TensorFlow."""
