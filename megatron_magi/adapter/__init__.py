"""Megatron-Core adapter (L5): stock `megatron.core` in, the same model with our attention out.

Importing this package checks the installed megatron-core first (see `compat`), so that an absent
or unknown version is one clear ImportError and not a failure deep inside a model.
"""

from megatron_magi.adapter.compat import require_megatron

MEGATRON_VERSION = require_megatron()
