"""Megatron-Core adapter (L5): gives models of stock `megatron.core` magi's attention.

Importing this package first checks the installed megatron-core (see `compat`), so that an absent
or unknown version raises one clear ImportError and does not fail deep inside a model.
"""

from megatron_magi.adapter.compat import require_megatron

MEGATRON_VERSION = require_megatron()
