"""L2: the exchange of rows between context-parallel ranks."""
