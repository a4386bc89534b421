"""Pictures of a mask, each rank's share, the traffic and the stages, as PNG and SVG.

Writes shares, mask, traffic and timeline into the folder --out.

examples:
  megatron-magi viz --lengths 8192x3,20000,500x8 --cp 4 --out pictures
  megatron-magi viz --lengths 65536 --window 4096 --cp 8 --only shares timeline --format svg
  megatron-magi viz --lengths 8192x3,20000,500x8 --cp 4 --text         in the terminal, no files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_magi.cli.mask_source import PlanInput, add_mask_options, plan_input, refuse_empty
from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.cli.plan import make_layouts, make_plan

PICTURES = ("shares", "mask", "traffic", "timeline")
FORMATS = ("png", "svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mask_options(parser)
    what = parser.add_argument_group("pictures")
    what.add_argument("--out", type=Path, metavar="FOLDER",
                      help="where to write (default magi_pictures)")  # fmt: skip
    what.add_argument("--only", nargs="+", choices=PICTURES, help="not all of them")
    what.add_argument("--format", nargs="+", choices=FORMATS, help="png, svg")
    what.add_argument("--text", action="store_true",
                      help="the shares as characters instead of pictures")  # fmt: skip
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Draw, print the paths, 0."""
    from megatron_magi.viz.style import save
    from megatron_magi.viz.text_map import side_by_side

    _refuse_with_text(options)
    given = plan_input(options)
    refuse_empty(given, "a picture")
    if options.text:
        print(side_by_side(make_layouts(given, make_plan(given))))
        return 0
    try:
        drawn = {name: draw() for name, draw in _pictures(given, options.only or PICTURES)}
    except ImportError as error:
        raise UsageError(str(error)) from error
    folder = options.out or Path("magi_pictures")
    paths = [
        str(path)
        for name, figure in drawn.items()
        for path in save(figure, folder / name, tuple(options.format or FORMATS))
    ]
    if options.json:
        print(json.dumps({"mask": given.text, "cp_size": given.cp_size, "pictures": paths}))
        return 0
    if not options.quiet:
        print(f"{given.text}, {given.cp_size} ranks")
    print("\n".join(paths))
    return 0


def _refuse_with_text(options: argparse.Namespace) -> None:
    """Raise UsageError for what --text would leave aside."""
    unused = [name for name in ("out", "only", "format", "json") if getattr(options, name)]
    if options.text and unused:
        raise UsageError(
            f"--text prints the shares and draws nothing, got --{unused[0]} with it; drop one of "
            f"them"
        )


def _pictures(given: PlanInput, names: Any) -> list[tuple[str, Callable[[], Any]]]:
    from megatron_magi.viz.plan_figures import mask_figure, shares_figure, traffic_figure
    from megatron_magi.viz.timeline_figure import timeline_figure

    plan = make_plan(given)
    text = f"{given.text}: who computes what on {given.cp_size} ranks"
    draw: dict[str, Callable[[], Any]] = {
        "shares": lambda: shares_figure(make_layouts(given, plan), text),
        "mask": lambda: mask_figure(given.mask, given.text),
        "traffic": lambda: traffic_figure(plan),
        "timeline": lambda: timeline_figure(plan),
    }
    return [(name, draw[name]) for name in names]
