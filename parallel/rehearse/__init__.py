"""Rehearsal: executes the program of one rank of a run of any size in a single process, with torch's fake tensors and fake process
group."""
