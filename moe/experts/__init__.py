"""The MoE layer, its experts, and in dispatch/ the exchange of tokens between the ranks that hold the experts."""
