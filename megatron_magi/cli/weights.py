"""HuggingFace Llama weights to a checkpoint that a run starts from, and a checkpoint back to them.

Needs megatron-core and safetensors (pip install 'megatron-magi[train,weights]'); no GPU.

examples:
  megatron-magi weights import Llama-3.2-1B --print-recipe            the model section that fits
  megatron-magi weights import Llama-3.2-1B --recipe llama.yaml --out weights/llama
  megatron-magi train llama.yaml checkpoint.load=weights/llama
  megatron-magi weights export runs/llama/checkpoints --out llama-hf
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.weights.hf_config import read_hf_model

if TYPE_CHECKING:
    from megatron_magi.training.weights.weights_checkpoint import Converted

FILE_GIB = 5.0
NOT_THEIRS = ("init_std", "fused")
"""Fields of the model section that have no key in a config.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_subparsers(dest="way", metavar="import|export", required=True)
    to_ours = ways.add_parser("import", help="a HuggingFace folder to a checkpoint of weights")
    to_ours.add_argument("folder", type=Path, metavar="HF_FOLDER",
                         help="has config.json and *.safetensors")  # fmt: skip
    to_ours.add_argument("--recipe", metavar="YAML", help="whose model section describes it")
    to_ours.add_argument("--out", type=Path, metavar="CHECKPOINT", help="a new folder")
    to_ours.add_argument("--print-recipe", action="store_true",
                         help="print the model section that fits, and stop")  # fmt: skip
    add_output_options(to_ours)
    to_theirs = ways.add_parser("export", help="a checkpoint's weights to a HuggingFace folder")
    to_theirs.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                           help="or a folder of them: the newest")  # fmt: skip
    to_theirs.add_argument("--out", type=Path, required=True, metavar="HF_FOLDER",
                           help="a new folder")  # fmt: skip
    to_theirs.add_argument("--file-gib", type=float, default=FILE_GIB,
                           help="largest file, GiB (default %(default)s)")  # fmt: skip
    add_output_options(to_theirs)


def run(options: argparse.Namespace) -> int:
    """Convert, print what was written, 0."""
    try:
        if options.way == "export":
            return _export(options)
        return _print_section(options) if options.print_recipe else _import(options)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    except ImportError as error:
        raise UsageError(
            f"converting weights needs megatron-core and omegaconf, got {error}; pip install them"
        ) from error
    except OSError as error:
        raise UsageError(
            f"converting weights needs files that it can read and a place that it can write, got "
            f"{error}; check the paths, permissions and free space"
        ) from error


def _import(options: argparse.Namespace) -> int:
    if options.recipe is None or options.out is None:
        raise UsageError(
            "weights import needs --recipe and --out, or --print-recipe, got not all of them; "
            "see megatron-magi weights import --help"
        )
    from megatron_magi.training.recipe.recipe import load_recipe
    from megatron_magi.training.weights.weights_checkpoint import import_weights

    done = import_weights(options.folder, load_recipe(options.recipe), options.out)
    return _say(options, done, f"; start from it with checkpoint.load={done.path}")


def _export(options: argparse.Namespace) -> int:
    from megatron_magi.training.weights.weights_checkpoint import export_weights

    if not 0 < options.file_gib < math.inf:
        raise UsageError(f"--file-gib must be above 0, got {options.file_gib}; 5 is usual")
    done = export_weights(options.checkpoint, options.out, int(options.file_gib * 2**30))
    return _say(options, done, "; its tokenizer is not in there")


def _print_section(options: argparse.Namespace) -> int:
    model = read_hf_model(options.folder)
    section = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in NOT_THEIRS}
    if options.json:
        print(json.dumps({"model": section}, indent=1))
        return 0
    print("\n".join(["model:", *(f"  {k}: {json.dumps(v)}" for k, v in section.items())]))
    return 0


def _say(options: argparse.Namespace, done: Converted, then: str) -> int:
    for note in done.notes:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps({**vars(done), "path": str(done.path)}))
    elif options.quiet:
        print(done.path)
    else:
        size = f"{done.num_bytes / 2**20:,.1f} MiB"
        print(f"{done.num_tensors:,} tensors, {size} of {done.dtype}, in {done.path}{then}")
    return 0
