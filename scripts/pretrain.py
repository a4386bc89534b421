#!/usr/bin/env python3
"""Train a recipe on stock megatron-core.

    python scripts/pretrain.py recipes/tiny_llama_cpu.yaml [section.key=value ...]
    python scripts/pretrain.py recipes/llama3_1b_h200.yaml --dry-run
    torchrun --nproc-per-node 8 scripts/pretrain.py recipes/llama3_1b_h200.yaml

Alone it starts the recipe's tp * pp * cp * dp processes on this machine; under torchrun it joins.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

from megatron_magi.training.checkpoint_folder import checkpoint_to_load
from megatron_magi.training.config import RecipeError, RunConfig, data_parallel_size
from megatron_magi.training.data import check_files
from megatron_magi.training.dry_run import dry_run, report
from megatron_magi.training.processes import Place, check_devices, process_groups, run_local
from megatron_magi.training.recipe import load_recipe, to_yaml

SECONDS_TO_REPORT = 20.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="YAML file; every key is a field of RunConfig")
    parser.add_argument("overrides", nargs="*", default=[], help="section.key=value, null for None")
    parser.add_argument("--print-config", action="store_true", help="print every value and stop")
    parser.add_argument("--dry-run", action="store_true", help="say what would run and stop")
    parser.add_argument("--mfu", type=float, default=0.4, help="assumed by --dry-run (%(default)s)")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=989.0,
        help="of a rank, assumed by --dry-run (%(default)s: dense bf16 of an H100 or H200)",
    )
    args = parser.parse_intermixed_args(arguments)
    place = _launched_place()
    try:
        config = load_recipe(args.recipe, args.overrides)
        if args.print_config:
            print(to_yaml(config), end="")
            return 0
        if args.dry_run:
            world_size = place.world_size if place else None
            if place is None or place.rank == 0:
                print(report(dry_run(config, world_size), args.mfu, args.peak_tflops))
            return 0
        num_processes = config.parallel.model_size * (config.parallel.dp or 1)
        data_parallel_size(config, place.world_size if place else num_processes)
        if place is None:
            check_devices(num_processes)
        check_files(config.data)
        checkpoint_to_load(config)
    except RecipeError as error:
        if place is None or place.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # torchrun stops all processes when one ends: rank 0 has to be the first
            time.sleep(SECONDS_TO_REPORT)
        return 2
    if place is not None:
        run_rank(config, place)
        return 0
    return run_local(partial(run_rank, config), num_processes)


def run_rank(config: RunConfig, place: Place) -> None:
    """One process of the run; ends it with exit code 1 and one line for an expected error."""
    with process_groups(config, place):
        from megatron_magi.training.loop import train
        from megatron_magi.training.step import TrainingStopped

        try:
            train(config)
        except (RecipeError, TrainingStopped) as error:
            print(f"error: rank {place.rank}: {error}", file=sys.stderr, flush=True)
            sys.exit(1)


def _launched_place() -> Place | None:
    """The place torchrun or srun-with-torchrun-variables gave this process; None when alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


if __name__ == "__main__":
    sys.exit(main())
