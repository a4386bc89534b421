"""Mamba-2 in plain torch, for the CPU: the definition, token by token."""

__version__ = "2.2.0"
