"""Ranks compare their calls before they exchange rows (docs/design/agreement.md)."""
