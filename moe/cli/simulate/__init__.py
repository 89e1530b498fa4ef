"""The verb `moe simulate`."""
