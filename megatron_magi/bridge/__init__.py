"""Our attention in Megatron-Bridge: `use_magi(config)` before Bridge's pretrain or finetune."""

import megatron_magi.adapter  # noqa: F401  (it prepares the import of megatron.core)
from megatron_magi.bridge.use import use_magi

__all__ = ["use_magi"]
