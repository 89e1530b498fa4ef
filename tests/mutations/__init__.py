"""Faults that training systems had, put into the running code to see that the oracle finds them."""
