"""Generic parallel training: ranks, tensors, modules and stages. It never imports `moe`."""
