"""Lists parallel plans for a recipe on a cluster, refuses plans that cannot run or do not fit, and ranks the others."""
