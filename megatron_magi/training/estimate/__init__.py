"""Estimates the cost of a recipe without running it."""
