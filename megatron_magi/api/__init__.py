"""A short name of `megatron_magi.magi_attention`, which has and describes everything in here."""

from megatron_magi.magi_attention import *  # noqa: F403
from megatron_magi.magi_attention import __all__ as __all__
from megatron_magi.magi_attention import __getattr__ as __getattr__
