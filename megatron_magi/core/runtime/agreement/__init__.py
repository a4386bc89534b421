"""Ranks compare their calls before they exchange rows (docs/agreement.md)."""
