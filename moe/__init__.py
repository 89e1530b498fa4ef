"""Dense and Mixture-of-Experts Transformers, trained in parallel from one recipe."""

__version__ = "0.1.0"
