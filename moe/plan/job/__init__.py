"""Describes a network and the plan that trains it, counts parameters and FLOPs, and cuts layers into pipeline stages."""
