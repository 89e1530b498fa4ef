"""The layouts that `moe verify` tries, by kind."""
