"""Measurements of one MoE layer."""
