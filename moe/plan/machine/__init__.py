"""Descriptions of clusters, devices and training programs (kernels, launch times, overlap of communication) for the planner."""
