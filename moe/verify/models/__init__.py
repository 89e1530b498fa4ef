"""Defines further models of `moe verify`."""
