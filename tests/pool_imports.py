"""What the processes of a pool have imported when they are forked, for `tests/process_pool.py`."""

import contextlib
import gc

import hypothesis  # noqa: F401  as test modules do, whose functions the processes call
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed  # noqa: F401

import megatron_magi

with contextlib.suppress(ImportError):  # seconds, and tests of the core need no Megatron
    import megatron_magi.adapter.plugin  # noqa: F401

gc.freeze()  # a collection in a fork would copy every page that it looks at
