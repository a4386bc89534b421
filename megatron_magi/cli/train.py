"""Train a recipe on stock megatron-core.

RECIPE is a YAML file whose keys are the fields of RunConfig, or the name of a packaged one.
Alone it starts the recipe's tp * pp * cp * dp processes on this machine; under torchrun it joins.
Exit code 0: done, or stopped by a signal with a checkpoint. 1: the run failed. 2: it cannot start.

examples:
  megatron-magi train tiny_llama_cpu [section.key=value ...]
  megatron-magi train llama3_1b_4gpu_cp4 --dry-run
  torchrun --nproc-per-node 8 -m megatron_magi train llama3_1b_8gpu_cp8
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from megatron_magi.cli.parser import UsageError, positive
from megatron_magi.training.process.processes import (
    Place,
    check_devices,
    launched_place,
    process_groups,
    run_local,
)
from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

SECONDS_TO_REPORT = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file or name of a packaged recipe")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value",
                        help="changes to the recipe; null for None")  # fmt: skip
    parser.add_argument("--print-config", action="store_true", help="print every value and stop")
    parser.add_argument("--dry-run", action="store_true", help="say what would run and stop")
    parser.add_argument(
        "--mfu", type=positive, default=0.4, help="assumed by --dry-run (%(default)s)"
    )
    parser.add_argument(
        "--peak-tflops",
        type=positive,
        help="of a rank, assumed by --dry-run (default for bf16: 989, dense, of an H100 or H200)",
    )


def run(options: argparse.Namespace) -> int:
    """Print, dry-run or train; the exit code of the run."""
    place = launched_place()
    try:
        config = _config(options)
        if options.print_config or options.dry_run:
            if place is None or place.rank == 0:
                _show(config, options, place)
            return 0
        _check_start(config, place)
    except RecipeError as error:
        if place is None or place.rank == 0:
            raise UsageError(str(error)) from error
        time.sleep(SECONDS_TO_REPORT)  # torchrun stops all when one ends: rank 0 must be first
        return 2
    if place is not None:
        run_rank(config, place)
        return 0
    return run_local(partial(run_rank, config), config.parallel.num_processes)


def run_rank(config: RunConfig, place: Place) -> None:
    """One process of the run; ends it with exit code 1 and one line for an expected error."""
    with process_groups(config, place):
        from megatron_magi.training.run.loop import train
        from megatron_magi.training.run.step import TrainingStopped

        try:
            train(config)
            return
        except (RecipeError, TrainingStopped) as error:
            text = str(error)
        except OSError as error:
            text = (
                f"files and streams of a run must be readable and writable, got {error!r}; see to "
                f"permissions and room"
            )
        print(f"error: rank {place.rank}: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


def _config(options: argparse.Namespace) -> RunConfig:
    try:
        from megatron_magi.training.recipe.recipe import load_recipe
    except ImportError as error:
        raise RecipeError(
            f"a recipe needs omegaconf, got: {error}; pip install 'megatron-magi[train]'"
        ) from error
    return load_recipe(options.recipe, options.overrides)


def _show(config: RunConfig, options: argparse.Namespace, place: Place | None) -> None:
    from megatron_magi.training.estimate.dry_run import dry_run, report
    from megatron_magi.training.recipe.recipe import to_yaml
    from megatron_magi.training.run.overwrite import check_overwrite

    if options.print_config:
        print(to_yaml(config), end="")
        return
    facts = dry_run(config, place.world_size if place else None)
    print(report(facts, options.mfu, options.peak_tflops), flush=True)
    check_overwrite(config)  # last, because the facts hold under any name


def _check_start(config: RunConfig, place: Place | None) -> None:
    """Raise RecipeError for what would stop the run at its start, before any process does work."""
    from megatron_magi.training.data.packed_samples import check_files
    from megatron_magi.training.run.overwrite import check_overwrite

    try:
        import megatron_magi.adapter  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"training needs megatron-core, got: {error}") from error
    num_processes = config.parallel.num_processes
    data_parallel_size(config, place.world_size if place else num_processes)
    if place is None:
        check_devices(num_processes)
    check_files(config.data)
    check_overwrite(config)
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"a run needs a folder that it can write, got {error}; set log.dir"
        ) from None
