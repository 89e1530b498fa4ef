"""One MoE layer: the experts, the layer around them, and in dispatch/ how rows reach them."""
