"""The CUDA library as Python sees it: structs, functions, and tables that lie on a device."""
