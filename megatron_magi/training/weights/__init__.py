"""HuggingFace weights in and out of checkpoints."""
