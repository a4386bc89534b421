"""The CUDA library as seen from Python: structs, functions, and tables on a device."""
