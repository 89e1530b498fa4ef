"""Plans a run without building the model: its FLOPs, memory, seconds and pipeline stages, and the search for the best layout."""
