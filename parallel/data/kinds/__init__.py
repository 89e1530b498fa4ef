"""Facts about data-parallel engines (DP and DDP, FSDP, ZeRO), and the catalog that lists them. This folder does not import torch."""
