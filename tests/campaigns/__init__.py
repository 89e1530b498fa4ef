"""Campaigns of fault injection: each puts faults into training runs and reports their outcomes."""
