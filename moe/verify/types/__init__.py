"""`moe verify --types`: checks which tensors are replicated, varying or partial sums along each mesh axis. It needs no reference run."""
