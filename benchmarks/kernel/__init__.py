"""The kernels on one GPU: speed beside peers, options that cost time, the time of the host."""
