"""Annotated programs: graphs, shardings, and their execution by DTensor."""
