"""Rehearses a run on one of its ranks, without the other ranks and without a GPU."""
