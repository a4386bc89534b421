"""The training loop, its model and steps, and its records."""
