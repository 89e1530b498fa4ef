"""Facts about data-parallel engines: one file a kind, and the catalog that lists them. This folder does not import torch."""
