"""Rehearses a run on any number of ranks in one process: tensors without values, a process group without peers."""
