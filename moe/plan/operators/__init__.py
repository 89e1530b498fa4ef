"""Plans of single operators: GSPMD, Mesh-TensorFlow."""
