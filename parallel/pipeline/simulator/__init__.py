"""A schedule timed without ranks: simulated, drawn, written as a trace."""
