"""GSPMD: graphs of operators annotated with shardings, their SPMD programs, and execution of these with DTensor."""
