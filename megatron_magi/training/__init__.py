"""L6: a typed run, its data, its loop and its log, on stock megatron-core."""
