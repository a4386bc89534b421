"""Times that are measured on this machine: costs for plans, and kernels of every rank."""
