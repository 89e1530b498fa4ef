"""One checkpoint made another: dense to experts and back."""
