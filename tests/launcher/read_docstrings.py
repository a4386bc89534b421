"""Megatron's parser without its slowest part."""

from __future__ import annotations

from typing import Any

from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_magi.launcher.megatron_flags import RaisingParser


def read_docstrings_once() -> None:
    """Keep the help texts that Megatron parses out of its classes' sources for every parser that it
    makes, three a run, and read them now."""
    original = ArgumentGroupFactory._get_field_docstrings
    answers: dict[Any, Any] = {}

    def read(self: Any, kind: Any) -> Any:
        if kind not in answers:
            answers[kind] = original(self, kind)
        return answers[kind]

    ArgumentGroupFactory._get_field_docstrings = read
    arguments.add_megatron_arguments(RaisingParser())
