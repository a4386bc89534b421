"""A run's processes: how they start and stop, what rank 0 decides, files written whole."""
