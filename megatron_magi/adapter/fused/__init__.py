"""Fused kernels for what Megatron's local layers compute in several operations beside attention.

`parts.py` chooses which parts run on this machine. Each part computes the same function as the
layers that it replaces and keeps their parameter names, so that checkpoints stay the same. A part
stays here if Megatron and torch alone would make a training step 2 % longer.
"""
