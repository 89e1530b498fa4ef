"""The network that is trained, the plan that trains it, their parameters, FLOPs and pipeline stages."""
