"""Reads and writes a checkpoint's facts, and finds damage. Needs no torch and no Megatron.

checkpoint.json holds the iteration, the samples consumed, the recipe, the checksum of the packed
data, and the size of every other file, so that a missing or truncated one is found without reading
it. The file of another version may have more keys, no checksum and no sizes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
)

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
NEEDED: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (ModelConfig, SHAPE_FIELDS),
    "parallel": (ParallelConfig, ("tp", "pp", "cp", "distributed_optimizer")),
    "data": (DataConfig, ("path", "seq_length", "eod_token")),
    "train": (TrainConfig, ("seed", "dtype")),
    "validation": (ValidationConfig, ("fraction",)),
}
"""The parts of a checkpoint's recipe that are read."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    iteration: int
    """Number of completed iterations."""
    consumed_samples: int
    """Number of samples used; the next iteration begins with the sample of this number."""
    world_size: int
    recipe: dict[str, Any]
    """The `RunConfig` that saved it, as nested dicts."""
    saved_at: float = 0.0
    """Seconds since the epoch, for people. Clocks may jump, so nothing is ordered by it."""
    weights_only: bool = False
    """Imported weights have no optimizer and no schedule; a run starts from them at iteration 0."""
    sizes: dict[str, int] | None = None
    """Bytes of every other file by its relative path; None if an earlier version wrote none."""
    data_sha256: str | None = None
    """The checksum of the packed data; None if its PREFIX.json has none, or an earlier version
    wrote none."""

    @property
    def layout(self) -> str:
        """How its processes were laid out."""
        p = self.recipe["parallel"]
        dp = self.world_size // (p["tp"] * p["pp"] * p["cp"])
        return f"tp {p['tp']} pp {p['pp']} cp {p['cp']} dp {dp}"


class DamagedCheckpointError(RecipeError):
    """A checkpoint that is not as it was written; `damage` says which file, and how."""

    # Made by `_damaged`, so that pickle, which passes the message alone, can send it to all ranks.
    damage = ""


def read_facts(path: Path) -> Checkpoint:
    """The content of the checkpoint.json in `path`; the other files are not read.

    Raises:
        DamagedCheckpointError: it is missing, unreadable, no JSON, or lacks what is needed.
    """
    try:
        read = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise _damaged(path, f"{FACTS} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{FACTS} is no JSON ({error})") from None
    wrong = next(_wrong_facts(read), None)
    if wrong is not None:
        raise _damaged(path, f"{FACTS} {wrong}")
    known = {f.name for f in fields(Checkpoint)}
    return Checkpoint(**{**{k: v for k, v in read.items() if k in known}, "path": path})


def check_files(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpointError unless every file that was written has the size it had.

    Cost: one stat for each file. Nothing is read, so bytes that changed are not found.
    """
    for name, size in (checkpoint.sizes or {}).items():
        try:
            found = (checkpoint.path / name).stat().st_size
        except OSError as error:
            raise _damaged(checkpoint.path, f"{name} is missing ({error.strerror})") from None
        if found != size:
            wrong = f"{name} has {found:,} bytes instead of {size:,}"
            raise _damaged(checkpoint.path, wrong)


def write_facts(partial: Path, config: RunConfig, more: dict[str, Any]) -> None:
    """Write checkpoint.json, the last file of a checkpoint, and sync it to the disk."""
    sizes = {
        path.relative_to(partial).as_posix(): path.stat().st_size
        for path in sorted(partial.rglob("*"))
        if path.is_file() and path != partial / FACTS
    }
    facts = {**more, "saved_at": time.time(), "recipe": asdict(config), "sizes": sizes}
    with (partial / FACTS).open("w", encoding="utf-8") as file:
        file.write(json.dumps(facts, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _damaged(path: Path, damage: str) -> DamagedCheckpointError:
    error = DamagedCheckpointError(
        f"a checkpoint must be what was written, got {path}, where {damage}; restore it, or "
        f"remove that checkpoint"
    )
    error.damage = damage
    return error


def _wrong_facts(read: Any) -> Iterator[str]:
    """What is wrong with the content of a checkpoint.json, as the rest of a sentence."""
    if not isinstance(read, dict):
        yield "is no JSON object"
        return
    for name, least in (("iteration", 0), ("consumed_samples", 0), ("world_size", 1)):
        value = read.get(name)
        if type(value) is not int or not least <= value < 2**53:
            yield f"needs {name}, a whole number from {least} to 2^53, and has {value!r}"
    if type(read.get("saved_at", 0.0)) not in (int, float):
        yield f"has {read['saved_at']!r} for saved_at, which is a number"
    if type(read.get("weights_only", False)) is not bool:
        yield f"has {read['weights_only']!r} for weights_only, which is true or false"
    if type(read.get("data_sha256")) not in (str, type(None)):
        yield f"has {read['data_sha256']!r} for data_sha256, which is a text"
    sizes = read.get("sizes")
    is_table = isinstance(sizes, dict) and all(type(size) is int for size in sizes.values())
    if sizes is not None and not is_table:
        yield "has something else than a table of bytes for sizes"
    yield from _wrong_recipe(read.get("recipe"))


def _wrong_recipe(recipe: Any) -> Iterator[str]:
    for section, (owner, names) in NEEDED.items():
        values = recipe.get(section) if isinstance(recipe, dict) else None
        hints = get_type_hints(owner)
        for name in names:
            if not isinstance(values, dict) or name not in values:
                yield f"lacks recipe.{section}.{name}"
            elif not _is_of(values[name], hints[name]):
                yield f"has {values[name]!r} for recipe.{section}.{name}"
            elif name in ("tp", "pp", "cp") and values[name] < 1:
                yield f"has {values[name]} for recipe.{section}.{name}"


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON may stand in a field with this type."""
    choices = get_args(hint) or (hint,)
    if type(value) is int and float in choices:
        return True
    return any(type(value) is c if isinstance(c, type) else value == c for c in choices)
