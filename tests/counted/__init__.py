"""Measurements that count bytes sent or kept, and compare them with closed forms."""
