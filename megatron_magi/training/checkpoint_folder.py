"""Checkpoints on disk: which are whole, which is newest, which fit a run. No torch, no Megatron.

A checkpoint is written to iter_NNNNNNN.partial and renamed when every rank has written its part, so
a folder named iter_NNNNNNN is always whole. Its checkpoint.json holds the recipe that saved it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_magi.training.config import RecipeError, RunConfig
from megatron_magi.training.whole_files import partial_folder

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
    weights_only: bool = False
    """Imported weights: no optimizer, no schedule; a run starts from them at iteration 0."""

    @property
    def layout(self) -> str:
        """How its processes were laid out."""
        p = self.recipe["parallel"]
        dp = self.world_size // (p["tp"] * p["pp"] * p["cp"])
        return f"tp {p['tp']} pp {p['pp']} cp {p['cp']} dp {dp}"


def checkpoint_folder(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.checkpoint.dir or config.folder / "checkpoints")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints of a run in its folder, the one saved last at the end."""
    if not folder.is_dir():
        return []
    found = [_read(p) for p in folder.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name)]
    own = [c for c in found if c is not None and not c.weights_only]
    return sorted(own, key=lambda c: (c.saved_at, c.iteration))


def find_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or the newest in that folder; None where there is none."""
    inside = list_checkpoints(path)
    return inside[-1] if inside else _read(path)


def checkpoint_to_load(config: RunConfig) -> Checkpoint | None:
    """What `config.checkpoint.load` means; None for a run from the start.

    Raises:
        RecipeError: nothing to load there, or another model, precision or optimizer sharding.
    """
    wanted = config.checkpoint.load
    if wanted is None:
        return None
    if wanted in ("latest", "auto"):
        where = checkpoint_folder(config)
        found = list_checkpoints(where)
        if not found and wanted == "auto":
            return None
        checkpoint = found[-1] if found else None
    else:
        where = Path(wanted)
        checkpoint = find_checkpoint(where)
    if checkpoint is None:
        raise RecipeError(
            f"checkpoint.load={wanted} needs a whole checkpoint, got none in {where}"
            f"{_unfinished(where)}; train first, or set checkpoint.load=null to begin anew"
        )
    check_fits(checkpoint, config)
    return checkpoint


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise RecipeError when this run cannot go on from `checkpoint`."""
    sections: list[tuple[str, tuple[str, ...]]] = [("model", SHAPE_FIELDS)]
    if not checkpoint.weights_only:
        sections += [("train", ("dtype",)), ("parallel", ("distributed_optimizer",))]
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
    return partial_folder(folder / f"iter_{iteration:07d}")


def finish(
    partial: Path, config: RunConfig, iteration: int, consumed_samples: int, world_size: int
) -> Path:
    """Make a written checkpoint whole, and drop old ones (one process calls it).

    Returns:
        Its final path.
    """
    counts = {"iteration": iteration, "consumed_samples": consumed_samples}
    _write_facts(partial, config, {**counts, "world_size": world_size})
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    if config.checkpoint.keep is not None:
        for old in list_checkpoints(final.parent)[: -config.checkpoint.keep]:
            shutil.rmtree(old.path)
    return final


def finish_weights(partial: Path, config: RunConfig) -> Path:
    """Make written weights a whole checkpoint that says it has nothing but weights."""
    counts = {"iteration": 0, "consumed_samples": 0, "world_size": 1}
    _write_facts(partial, config, {**counts, "weights_only": True})
    return partial.rename(partial.with_suffix(""))


def _write_facts(partial: Path, config: RunConfig, more: dict[str, Any]) -> None:
    facts = {**more, "saved_at": time.time(), "recipe": asdict(config)}
    (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def _read(path: Path) -> Checkpoint | None:
    facts = path / FACTS
    if path.suffix == ".partial" or not facts.is_file():
        return None
    known = {f.name for f in fields(Checkpoint)}
    try:
        read = json.loads(facts.read_text())
        return Checkpoint(**{**{k: v for k, v in read.items() if k in known}, "path": path})
    except (ValueError, AttributeError, TypeError) as error:  # no JSON, no object, no field
        raise RecipeError(
            f"{FACTS} must be what was written with its checkpoint, got {error} in {path}; "
            f"restore it, or remove that checkpoint"
        ) from None


def _unfinished(folder: Path) -> str:
    partial = sorted(p.name for p in folder.glob("*.partial")) if folder.is_dir() else []
    return f" (unfinished: {', '.join(partial)})" if partial else ""
