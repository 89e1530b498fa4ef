"""A run of a world that is not there, walked through by one rank: tensors without values, a process group without peers."""
