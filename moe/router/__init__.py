"""The router of an MoE layer: scores, selection of experts, capacity and balance."""
