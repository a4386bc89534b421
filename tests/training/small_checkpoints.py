"""Checkpoints of a few bytes, without training, and how they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_magi.training.checkpoint.checkpoint_facts import FACTS
from megatron_magi.training.checkpoint.checkpoint_folder import finish, open_partial
from megatron_magi.training.recipe.recipe import build_config
from megatron_magi.training.recipe.run_config import RunConfig

Facts = dict[str, Any]


def config_of(
    folder: Path, load: str | None = "latest", keep: int | None = None, **sections: Any
) -> RunConfig:
    """A run under this folder; sections by name."""
    from omegaconf import OmegaConf

    plain = {"data": {"path": "x"}, "log": {"dir": str(folder)}, **sections}
    return build_config([OmegaConf.create({**plain, "checkpoint": {"load": load, "keep": keep}})])


def write(config: RunConfig, iteration: int, data_sha256: str | None = None) -> Path:
    partial = open_partial(Path(config.log.dir) / config.name / "checkpoints", iteration)
    (partial / "tensors.distcp").write_bytes(b"w" * 100)
    return finish(partial, config, iteration, iteration * 8, 4, data_sha256)


def change(path: Path, edit: Callable[[Facts], Any]) -> None:
    facts = json.loads((path / FACTS).read_text())
    edit(facts)
    (path / FACTS).write_text(json.dumps(facts))


def cut(path: Path) -> None:
    text = (path / FACTS).read_bytes()
    (path / FACTS).write_bytes(text[: len(text) // 2])


def shorter_tensors(path: Path) -> None:
    (path / "tensors.distcp").write_bytes(b"w" * 99)
