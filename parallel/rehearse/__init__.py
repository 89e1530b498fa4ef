"""Rehearsal: one process executes one rank of a run of any size, with torch's fake tensors and fake process group."""
