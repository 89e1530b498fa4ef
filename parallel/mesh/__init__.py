"""The mesh of ranks, layouts of parameters, and collectives."""
