"""L2: rows between context-parallel ranks."""
