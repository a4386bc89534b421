"""One kernel for what Megatron's local layers do in several: the parts beside attention.

`parts.py` chooses what runs here and says so. Each part computes what the layers it stands in for
compute, and keeps their parameter names, so that checkpoints do not know about it.
"""
