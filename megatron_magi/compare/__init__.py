"""Comparison of training runs: curves, gradients, and the effect of rounding alone."""
