"""Saving a run and going on with it."""
