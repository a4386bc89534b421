"""Checkpoints on disk: which are whole, which is newest, which fit a run. No torch, no Megatron.

A checkpoint is written to iter_NNNNNNN.partial and renamed when every rank has written its part, so
a folder named iter_NNNNNNN is always whole. Its checkpoint.json holds the recipe that saved it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_magi.training.config import RecipeError, RunConfig

FACTS = "checkpoint.json"
SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "head_dim",
    "vocab_size",
    "vocab_multiple",
    "tie_embeddings",
)
"""Fields of the model section that change the shape or number of its weights."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    iteration: int
    """Iterations done."""
    consumed_samples: int
    """Samples used; the next iteration begins with the sample of this number."""
    saved_at: float
    """Seconds since the epoch."""
    world_size: int
    recipe: dict[str, Any]
    """The `RunConfig` that saved it, as nested dicts."""

    @property
    def layout(self) -> str:
        """How its processes were laid out."""
        p = self.recipe["parallel"]
        dp = self.world_size // (p["tp"] * p["pp"] * p["cp"])
        return f"tp {p['tp']} pp {p['pp']} cp {p['cp']} dp {dp}"


def checkpoint_folder(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.checkpoint.dir or Path(config.log.dir) / config.name / "checkpoints")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints of a folder, the one saved last at the end."""
    if not folder.is_dir():
        return []
    found = [_read(p) for p in folder.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name)]
    return sorted((c for c in found if c is not None), key=lambda c: (c.saved_at, c.iteration))


def checkpoint_to_load(config: RunConfig) -> Checkpoint | None:
    """What `config.checkpoint.load` means; None for a run from the start.

    Raises:
        RecipeError: nothing to load there, or another model, precision or optimizer sharding.
    """
    wanted = config.checkpoint.load
    if wanted is None:
        return None
    if wanted in ("latest", "auto"):
        found = list_checkpoints(checkpoint_folder(config))
        if not found and wanted == "auto":
            return None
        checkpoint = found[-1] if found else None
        where = checkpoint_folder(config)
    else:
        where = Path(wanted)
        inside = list_checkpoints(where)
        checkpoint = inside[-1] if inside else _read(where)
    if checkpoint is None:
        raise RecipeError(
            f"checkpoint.load={wanted} needs a whole checkpoint, got none in {where}"
            f"{_unfinished(where)}; train first, or set checkpoint.load=null to begin anew"
        )
    check_fits(checkpoint, config)
    return checkpoint


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise RecipeError when this run cannot go on from `checkpoint`."""
    sections = [("model", SHAPE_FIELDS), ("train", ("dtype",))]
    sections.append(("parallel", ("distributed_optimizer",)))
    other = []
    for section, names in sections:
        saved = checkpoint.recipe[section]
        for name in names:
            mine = getattr(getattr(config, section), name)
            if saved[name] != mine:
                other.append(f"{section}.{name} {mine} (saved: {saved[name]})")
    if other:
        raise RecipeError(
            f"model, precision and optimizer must be those of the checkpoint, got "
            f"{', '.join(other)} with {checkpoint.path}; use the saved values, or "
            f"checkpoint.load=null to begin anew"
        )


def order_changes(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Settings under which sample numbers now mean other tokens than before the checkpoint."""
    named = [("data", n) for n in ("path", "seq_length")]
    named += [("train", "seed"), ("validation", "fraction")]
    saved = checkpoint.recipe
    return [
        f"{section}.{name}: {saved[section][name]} before, {now} now"
        for section, name in named
        if (now := getattr(getattr(config, section), name)) != saved[section][name]
    ]


def open_partial(folder: Path, iteration: int) -> Path:
    """An empty folder to write the checkpoint of `iteration` into (one process calls it)."""
    partial = folder / f"iter_{iteration:07d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(
    partial: Path, config: RunConfig, iteration: int, consumed_samples: int, world_size: int
) -> Path:
    """Make a written checkpoint whole, and drop old ones (one process calls it).

    Returns:
        Its final path.
    """
    facts = {
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "saved_at": time.time(),
        "world_size": world_size,
        "recipe": asdict(config),
    }
    (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    if config.checkpoint.keep is not None:
        for old in list_checkpoints(final.parent)[: -config.checkpoint.keep]:
            shutil.rmtree(old.path)
    return final


def _read(path: Path) -> Checkpoint | None:
    facts = path / FACTS
    if path.suffix == ".partial" or not facts.is_file():
        return None
    return Checkpoint(path=path, **json.loads(facts.read_text()))


def _unfinished(folder: Path) -> str:
    partial = sorted(p.name for p in folder.glob("*.partial")) if folder.is_dir() else []
    return f" (unfinished: {', '.join(partial)})" if partial else ""
