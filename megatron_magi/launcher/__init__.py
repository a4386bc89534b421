"""`--attention-backend magi` for Megatron's own pretrain scripts (L6).

`python -m megatron_magi.run SCRIPT ...` calls `install()`; a patched script calls it itself.
"""

import megatron_magi.adapter  # noqa: F401  checks the installed megatron-core first
from megatron_magi.launcher.install import install

__all__ = ["install"]
