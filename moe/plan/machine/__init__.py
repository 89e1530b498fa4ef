"""Devices, nodes, links and software."""
