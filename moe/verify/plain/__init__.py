"""The plain twin of `moe verify`: a second implementation, which shares no code with the one that it checks."""
