"""Attention over several ranks: speed beside other methods, and what surrounds a call."""
