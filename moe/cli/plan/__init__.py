"""The verb `moe plan`."""
