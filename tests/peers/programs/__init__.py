"""Outside programs for `moe verify --compare`: training loops in plain torch, with faults that are put in by name."""
