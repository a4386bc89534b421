"""L6: a typed run with its data, loop and log, on stock megatron-core."""

import contextlib

# Before any module here imports megatron: the adapter prepares that import (see adapter/compat.py).
# Without a supported megatron-core, data preparation still works and training raises its error.
with contextlib.suppress(ImportError):
    import megatron_magi.adapter  # noqa: F401
