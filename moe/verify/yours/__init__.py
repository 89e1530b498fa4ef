"""Records a step of any PyTorch program, and compares the recordings of two layouts: `moe verify --compare ONE MANY`."""
