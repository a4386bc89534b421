"""Gated delta rule in plain torch, for the CPU: the definition, token by token."""
