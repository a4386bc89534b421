"""Stands in for TransformerEngine where it is not installed: its context parallelism, plainly."""
