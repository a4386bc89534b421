"""The recipes of a Megatron-Bridge checkout: each function runs, and its settings become arguments.

The counts say what the launcher's rules, which `megatron_magi.bridge.use_magi` applies, do to its
recipes. Only recipes and a few settings modules are imported.
Recorders take the place of all others, and what a model's family brings along with it (its provider
would read it from a published checkpoint) is in a table here.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from published_jobs.recorder import recorded, standing_in
from published_jobs.rules import reasons
from published_jobs.table import Row

from megatron_magi.bridge.arguments import set_arguments

PACKAGE = "megatron.bridge"

LIBRARY, PERFORMANCE = "recipes", "perf_recipes"
"""Folders of recipes: for users, and for published measurements of speed."""

REAL = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        LIBRARY,
        PERFORMANCE,
        "diffusion.recipes",
        "training.comm_overlap",
        "training.mixed_precision",
        "training.flex_dispatcher_backend",
        "utils.cuda_graph",
    )
)
"""Modules that run as they are; every other one of the package is a stand-in."""

GPUS = ("h100", "b200", "b300", "gb200", "gb300", "vr200", "r100")
"""Folders below a family, one for each GPU."""

MLA = {"multi_latent_attention": True, "moe_router_load_balancing_type": "seq_aux_loss"}

FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"deepseek_v[23]|kimi|moonlight", MLA),
    (r"deepseek_v4", {**MLA, "experimental_attention_variant": "dsv4_hybrid"}),
    (r"glm5", {**MLA, "experimental_attention_variant": "dsa"}),
    (r"glm45|glm_45", {"moe_router_load_balancing_type": "seq_aux_loss"}),
    (r"qwen3_next|qwen35", {"experimental_attention_variant": "gated_delta_net"}),
    (r"gpt_oss", {"position_embedding_type": "yarn"}),
    (r"nemotronh|nemotron_nano|nemotron_3|nemotron_omni", {"hybrid_layer_pattern": "M-*"}),
)
"""By the name of the module: arguments that the family's provider sets, not the recipe."""

OTHER_MODELS = (
    (r"_vl\b|_vl_|_vl\.|45v|omni|audio|exaone45|step37|minimax_m3", "multimodal model"),
    (r"wan|flux", "diffusion model"),
    (r"gemma[34]|step35", "rotary embedding of its own"),
    (r"gemma2|ministral3", "core attention of its own"),
)
"""By the name of the module: models whose batches or positions the launcher does not know."""

USUAL = {
    "apply_rope_fusion": False,
    "attention_dropout": 0.0,
    "micro_batch_size": 1,
    "position_embedding_type": "rope",
    "seq_length": 4096,
}
"""Defaults of Bridge's providers that differ from those of Megatron's parser."""


def read_recipes(bridge: Path, defaults: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """(a row for each recipe that runs here, why the others do not); ``defaults`` are Megatron's
    arguments for an empty command line."""
    rows: list[Row] = []
    unread: dict[str, str] = {}
    with standing_in(PACKAGE, str((bridge / "src").resolve()), REAL):
        for name in module_names(bridge / "src" / "megatron" / "bridge"):
            try:
                rows += _rows_of_module(name, defaults, unread)
            except Exception as error:  # a module of somebody else may fail in any way
                unread[name] = f"{type(error).__name__}: {error}"
    return rows, unread


def module_names(package: Path) -> Iterator[str]:
    """Modules of recipes: those in a folder that is named after a GPU."""
    for kind in (LIBRARY, PERFORMANCE):
        for path in sorted((package / kind).rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            if parts[-2] in GPUS and parts[-1] != "__init__":
                yield ".".join((PACKAGE, *parts))


def _rows_of_module(
    name: str, defaults: argparse.Namespace, unread: dict[str, str]
) -> Iterator[Row]:
    for title, recipe in inspect.getmembers(importlib.import_module(name), inspect.isfunction):
        if recipe.__module__ != name or title.startswith("_") or not title.endswith("_config"):
            continue
        short = f"{name.removeprefix(PACKAGE + '.')}.{title}"
        try:
            yield row_of(short, recipe(), defaults)
        except Exception as error:
            unread[short] = f"{type(error).__name__}: {error}"


def row_of(name: str, settings: Any, defaults: argparse.Namespace) -> Row:
    """A recipe's settings under the launcher's rules; ``name`` is folder.family.gpu.module.recipe.

    Its kind is the folder and its only mark the GPU.
    """
    kind, _, gpu, module, _ = name.split(".")
    args = arguments_of(settings, f"{module}.", defaults)
    found = {*reasons(args)}
    found |= {what for pattern, what in OTHER_MODELS if re.search(pattern, name)}
    return Row(name, kind, (gpu,), tuple(sorted(found)))


def arguments_of(settings: Any, module: str, defaults: argparse.Namespace) -> argparse.Namespace:
    """Megatron's arguments that say what the recipe says."""
    args = copy.copy(defaults)
    vars(args).update(USUAL)
    for pattern, given in FAMILIES:
        if re.search(pattern, module):
            vars(args).update(given)
    set_arguments(args, settings, recorded)
    _set_overlap(args, recorded(settings, "comm_overlap"))
    return args


def _set_overlap(args: argparse.Namespace, overlap: Any) -> None:
    """Bridge switches it off where there is no tensor parallelism to overlap."""
    args.tp_comm_overlap = bool(
        recorded(overlap, "tp_comm_overlap")
        and args.tensor_model_parallel_size > 1
        and args.sequence_parallel
    )


def sets_of(rows: list[Row], kind: str) -> dict[str, Callable[[Row], bool]]:
    """The recipes of a folder, whole and by GPU."""
    sets: dict[str, Callable[[Row], bool]] = {f"Bridge {kind}": lambda row: row.kind == kind}
    for gpu in sorted({row.marks[0] for row in rows if row.kind == kind}):
        sets[f"of these for {gpu}"] = functools.partial(_is_for, kind, gpu)
    return sets


def _is_for(kind: str, gpu: str, row: Row) -> bool:
    return row.kind == kind and gpu in row.marks
