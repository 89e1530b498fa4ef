"""Puts faults that real training systems had into the running code, and checks that `moe verify` finds them."""
