"""The MoE layer: its experts, the layer around them, and in dispatch/ the exchange of rows."""
