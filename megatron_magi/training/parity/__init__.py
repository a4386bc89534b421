"""Whether two runs are the same training: curves, gradients, and what rounding alone does."""
