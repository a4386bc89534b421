"""Finds checkpoints that are whole, newest, or fit a run. Needs no torch and no Megatron.

A checkpoint is written to iter_NNNNNNN.partial and renamed when every rank has written its part, so
a folder named iter_NNNNNNN was whole once. One that no longer is (checkpoint_facts.py) is skipped
with a line for the log, unless it was asked for by its name. The newest is the one with the most
iterations, because clocks may jump and copied folders have the times of other clocks.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_magi.training.checkpoint.checkpoint_facts import (
    FACTS,
    SHAPE_FIELDS,
    Checkpoint,
    DamagedCheckpointError,
    check_files,
    read_facts,
    write_facts,
)
from megatron_magi.training.process.whole_files import (
    cannot_write,
    partial_folder,
    remove_folder,
    replace_folder,
)
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

GROUP_FIELDS = (
    "data.balance_steps",
    "train.global_batch_size",
    *(f"data.{name}" for name in ("mask", "window", "block_tokens", "block_window")),
    "data.moved_boundary",
    *(f"magi.costs.{name}" for name in ("tile_q", "tile_k")),
)
"""What decides which samples share a step under data.balance_steps: the size of a group, and what
changes the order of its samples by cost."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a run resumes from, and those that it skipped."""

    checkpoint: Checkpoint | None = None
    """None: there is none."""
    notes: tuple[str, ...] = ()
    """Lines for the log on newer ones that are damaged."""


def checkpoint_folder(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.checkpoint.dir or config.folder / "checkpoints")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints of a run in its folder, the one with the most iterations at the end."""
    return [found for _, found in _candidates(folder) if isinstance(found, Checkpoint)]


def find_checkpoint(path: Path) -> Choice:
    """The checkpoint at `path`, or the newest whole one in that folder.

    Raises:
        DamagedCheckpointError: it is damaged, or all in that folder are.
    """
    found = _newest(path)
    if found.checkpoint is not None or path.suffix == ".partial" or not (path / FACTS).exists():
        return found
    checkpoint = read_facts(path)
    check_files(checkpoint)
    return Choice(checkpoint)


def choose_checkpoint(config: RunConfig) -> Choice:
    """The choice that `config.checkpoint.load` asks for; no checkpoint for a run from the start.

    Raises:
        RecipeError: nothing to load there, only damaged ones, or another model, precision or
            optimizer sharding.
    """
    wanted, own = config.checkpoint.load, checkpoint_folder(config)
    if wanted is None:
        return Choice(notes=_later(own, 0))
    is_own = wanted in ("latest", "auto")
    where = own if is_own else Path(wanted)
    choice = _newest(where) if is_own else find_checkpoint(where)
    if choice.checkpoint is None and wanted == "auto":
        return choice
    if choice.checkpoint is None:
        raise RecipeError(
            f"checkpoint.load={wanted} needs a whole checkpoint, got none in {where}"
            f"{_unfinished(where)}; train first, or set checkpoint.load=null to begin anew"
        )
    check_fits(choice.checkpoint, config)
    if is_own:
        return choice
    return Choice(choice.checkpoint, choice.notes + _later(own, choice.checkpoint.iteration))


def check_fits(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise RecipeError when this run cannot resume from `checkpoint`."""
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


OF_THE_ORDER = ("data.path", "data.seq_length", "train.seed", "validation.fraction")
"""Settings that decide which tokens a sample number means."""

OF_THE_FUNCTION = (
    *("model.rotary_base", "model.rope_scaling", "model.rope_scaling_factor", "model.norm_epsilon"),
    *("data.mask", "data.block_tokens", "data.block_window", "data.window"),
    "data.mask_across_documents",
)
"""Settings that decide what the same weights compute."""


def changes(checkpoint: Checkpoint, config: RunConfig, names: tuple[str, ...]) -> list[str]:
    """Those of these settings that are not as they were when the checkpoint was saved; one that it
    does not have is taken as unchanged."""
    now = asdict(config)
    found = []
    for name in names:
        section, _, key = name.partition(".")
        before = checkpoint.recipe.get(section, {}).get(key, now[section][key])
        if before != now[section][key]:
            found.append(f"{name}: {before} before, {now[section][key]} now")
    return found


def changed_order(checkpoint: Checkpoint, config: RunConfig, data_sha256: str | None) -> list[str]:
    """Why a sample number means other tokens than when the checkpoint was saved: settings, or other
    data (with this checksum) at the same path. Data without a checksum is taken as unchanged."""
    found = changes(checkpoint, config, OF_THE_ORDER)
    is_same_path = checkpoint.recipe["data"]["path"] == config.data.path
    before = checkpoint.data_sha256
    if is_same_path and before and data_sha256 and before != data_sha256:
        found.append(
            f"the data at {config.data.path}: sha256 {before[:12]} before, {data_sha256[:12]} now"
        )
    return found


def interrupted_group(checkpoint: Checkpoint, config: RunConfig) -> str | None:
    """What to know if data.balance_steps moved samples among steps of which some are still to come,
    and those are moved in another way now; None if nothing is lost."""
    recipes = checkpoint.recipe, asdict(config)
    before, now = ([_value(recipe, name) for name in GROUP_FIELDS] for recipe in recipes)
    if before == now or not any(
        _is_inside_group(checkpoint.consumed_samples, *values[:2]) for values in (before, now)
    ):
        return None
    changed = "; ".join(
        f"{name}: {old} before, {new} now"
        for name, old, new in zip(GROUP_FIELDS, before, now, strict=True)
        if old != new
    )
    return (
        f"note: {checkpoint.consumed_samples} samples end inside a group of steps whose samples "
        f"change places, and they change places in another way now ({changed}): a few samples may "
        f"be trained twice, and as many left out"
    )


def _value(recipe: Any, path: str) -> Any:
    """What a saved recipe has for section.key; None where an earlier version had no such key."""
    for name in path.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


def _is_inside_group(consumed: int, steps: int | None, batch: int | None) -> bool:
    """Whether a group of ``steps`` steps was begun and not completed."""
    return steps is not None and batch is not None and consumed // batch % steps != 0


def open_partial(folder: Path, iteration: int) -> Path:
    """An empty folder to write the checkpoint of `iteration` into (one process calls it).

    What a killed run left unfinished there is removed.

    Raises:
        RecipeError: the folder cannot be written.
    """
    try:
        for stale in folder.glob("iter_*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        return partial_folder(folder / f"iter_{iteration:07d}")
    except OSError as error:
        raise not_written(folder, iteration, error) from error


def finish(
    partial: Path,
    config: RunConfig,
    iteration: int,
    consumed_samples: int,
    world_size: int,
    data_sha256: str | None = None,
) -> Path:
    """Make a written checkpoint whole, and delete old ones, never this one (one process calls it).

    Returns:
        Its final path.

    Raises:
        RecipeError: it could not be completed, and was removed.
    """
    counts = {"iteration": iteration, "consumed_samples": consumed_samples}
    final = partial.with_suffix("")
    try:
        more = {"world_size": world_size, "data_sha256": data_sha256}
        write_facts(partial, config, {**counts, **more})
        replace_folder(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(final.parent, iteration, error) from error
    if config.checkpoint.keep is not None:
        for old in list_checkpoints(final.parent)[: -config.checkpoint.keep]:
            if old.path != final:
                remove_folder(old.path)
    return final


def finish_weights(partial: Path, config: RunConfig) -> Path:
    """Make written weights a whole checkpoint, marked as having only weights."""
    counts = {"iteration": 0, "consumed_samples": 0, "world_size": 1}
    write_facts(partial, config, {**counts, "weights_only": True})
    return partial.rename(partial.with_suffix(""))


def not_written(folder: Path, iteration: int, why: BaseException) -> RecipeError:
    """The error for a checkpoint that could not be written, with what to do."""
    what = f"the checkpoint of iteration {iteration}"
    whole = list_checkpoints(folder)
    if not whole:
        return cannot_write(what, folder, why, "make room or set checkpoint.dir, and start again")
    last = whole[-1]
    remedy = f"make room or set checkpoint.dir, and go on with checkpoint.load={last.path}"
    return cannot_write(what, folder, why, remedy)


def _newest(folder: Path) -> Choice:
    """The newest whole checkpoint of a run in its folder, and lines on newer ones that are skipped.

    Raises:
        DamagedCheckpointError: there are some, and none is whole.
    """
    damaged: list[tuple[Path, DamagedCheckpointError]] = []
    for path, found in reversed(_candidates(folder)):
        if isinstance(found, Checkpoint):
            note = "note: damaged checkpoint passed over"
            return Choice(found, tuple(f"{note}: {p}, where {e.damage}" for p, e in damaged))
        damaged.append((path, found))
    if damaged:
        raise damaged[0][1]
    return Choice()


def _candidates(folder: Path) -> list[tuple[Path, Checkpoint | DamagedCheckpointError]]:
    """A run's checkpoints in order of their iteration, or of their name's if unreadable."""
    found: list[tuple[int, Path, Checkpoint | DamagedCheckpointError]] = []
    for path in _folders(folder):
        try:
            checkpoint = read_facts(path)
        except DamagedCheckpointError as error:
            found.append((int(path.name[5:]), path, error))
        else:
            if not checkpoint.weights_only:
                found.append((checkpoint.iteration, path, _damage(checkpoint) or checkpoint))
    return [(path, made) for _, path, made in sorted(found, key=lambda f: f[:2])]


def _folders(folder: Path) -> list[Path]:
    try:
        inside = list(folder.iterdir()) if folder.is_dir() else []
        return [p for p in inside if re.fullmatch(r"iter_\d{7,}", p.name) and p.is_dir()]
    except OSError as error:
        raise RecipeError(
            f"the checkpoints' folder must be readable, got {error}; see to its permissions, or "
            f"name another"
        ) from error


def _damage(checkpoint: Checkpoint) -> DamagedCheckpointError | None:
    try:
        check_files(checkpoint)
    except DamagedCheckpointError as error:
        return error
    return None


def _later(folder: Path, iteration: int) -> tuple[str, ...]:
    """A note on checkpoints that this run does not resume from, but a later start would."""
    later = [c.path.name for c in list_checkpoints(folder) if c.iteration > iteration]
    if not later:
        return ()
    return (
        f"note: {folder} has {', '.join(later)} of another start, which checkpoint.load=latest and "
        f"auto go on from until this run is beyond; remove what is not wanted",
    )


def _unfinished(folder: Path) -> str:
    partial = sorted(p.name for p in folder.glob("*.partial")) if folder.is_dir() else []
    return f" (unfinished: {', '.join(partial)})" if partial else ""
