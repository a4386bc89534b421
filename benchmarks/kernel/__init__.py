"""The kernels on one GPU: speed against peers, options that cost time, host time."""
