"""Attention over several ranks: speed compared with other methods, and what surrounds a call."""
