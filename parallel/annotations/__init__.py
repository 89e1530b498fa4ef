"""GSPMD: graphs of operators annotated with shardings, their SPMD programs, and the execution of these programs with DTensor."""
