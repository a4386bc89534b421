"""A run's processes: their start and stop, decisions of rank 0, and files written whole."""
