"""`moe verify --types`: checks what is replicated, varying or partial on which axis of the mesh, without a twin's numbers."""
