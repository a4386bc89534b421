"""Masks and plans in numbers and pictures (matplotlib, the optional extra ``viz``)."""
