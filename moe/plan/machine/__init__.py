"""Descriptions of clusters, devices and training programs."""
