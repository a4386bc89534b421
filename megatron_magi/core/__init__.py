"""Distributed attention; imports torch, never Megatron."""

from megatron_magi.requirements import check_requirements

check_requirements()
