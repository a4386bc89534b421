"""Imports HuggingFace weights into checkpoints, and exports them."""
