"""A schedule's times without ranks: simulated, drawn, written as a trace."""
