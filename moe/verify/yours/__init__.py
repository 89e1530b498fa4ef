"""Records a step of any PyTorch program, on one process and on several ranks, and compares the two: `moe verify --compare ONE MANY`."""
