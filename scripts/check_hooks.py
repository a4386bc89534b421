"""Compare the launcher's table of hook points with a Megatron; one line for each point.

    python scripts/check_hooks.py [--megatron PATH]    # default: the Megatron that Python imports

PATH is a source checkout or an unpacked wheel. A version that the table does not know is compared
with the rows of the nearest one. Exits with 1 if a point does not fit.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; 1 if a point does not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, help="folder that holds megatron/core")
    folder: Path | None = parser.parse_args(argv).megatron
    if folder is not None and not (folder / "megatron" / "core").is_dir():
        parser.error(f"--megatron must hold megatron/core, got {folder}; name a checkout or wheel")
    sys.path[:0] = [] if folder is None else [str(folder.resolve())]
    try:
        version = prepare_any_version()
    except ImportError as error:
        parser.error(str(error))
    print(f"Megatron {version} from {megatron_folder()}", flush=True)
    wrong = start_on_any_device() + print_rows(rows_of(version))
    print(closing_words(version, wrong))
    return 1 if wrong else 0


def prepare_any_version() -> Any:
    """Import the adapter for the Megatron on the path, also for one that it would refuse.

    Raises:
        ImportError: there is no Megatron, or it needs a package that is absent.
    """
    name = "megatron_magi.adapter.compat"
    sys.path.append(str(ROOT))
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name.replace('.', '/')}.py")
    assert spec is not None and spec.loader is not None, f"{name} is a file of this repository"
    compat = importlib.util.module_from_spec(spec)
    sys.modules[name] = compat
    spec.loader.exec_module(compat)
    version = compat.installed_version()
    if version is not None:
        compat.SUPPORTED_MINORS = (*compat.SUPPORTED_MINORS, version[:2])
    import megatron_magi.adapter

    return megatron_magi.adapter.MEGATRON_VERSION


def megatron_folder() -> Path:
    """Where `megatron.core` is imported from."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations, "require_megatron found it"
    return Path(spec.submodule_search_locations[0]).parents[1]


def start_on_any_device() -> list[str]:
    """Make Megatron importable on a machine without CUDA; names what hinders it."""
    from megatron_magi.launcher import cpu

    try:
        cpu.skip_compilation_of_wheels()
        cpu.install_cpu_training()
    except (ImportError, AttributeError) as error:
        print(f"{'cpu-runtime':<16} {cpu.__name__:<90} ({error})")
        return ["cpu-runtime"]
    return []


def rows_of(version: Any) -> list[Any]:
    """The table's rows of this version, or of the nearest one that the table knows."""
    from megatron_magi.launcher import hook_points

    return hook_points.points_of(nearest(version))


def nearest(version: Any) -> Any:
    """The version itself, or the first or last that the table knows."""
    from megatron_magi.launcher.hook_points import FIRST, LAST

    known = min(max(tuple(version[:2]), FIRST), LAST)
    return version if known == version[:2] else type(version)(*known, 0)


def print_rows(points: list[Any]) -> list[str]:
    """One line for each point; returns the names of those that do not fit."""
    wrong = []
    for point in points:
        place = f"{point.module}.{point.attribute}"
        said = [text.removeprefix(f"{point.name}: {place} ") for text in problems_of(point)]
        print(f"{point.name:<16} {place:<90} {'; '.join(said) or 'ok'}")
        wrong += [point.name] if said else []
    return wrong


def problems_of(point: Any) -> list[str]:
    """What does not fit at a point; code that fails while it is imported does not fit either."""
    from megatron_magi.launcher.hook_points import problems

    try:
        return list(problems(point))
    except Exception as error:
        return [f"({type(error).__name__}: {error})"]


def closing_words(version: Any, wrong: list[str]) -> str:
    """What the rows amount to, and which lines to edit."""
    lines = []
    if wrong:
        lines.append(
            f"every hook point must fit, got other code at {', '.join(wrong)}; change these rows "
            f"of HOOK_POINTS in megatron_magi/launcher/hook_points.py, or end them by `last` and "
            f"add rows with `first` (cpu-runtime is megatron_magi/launcher/cpu.py)"
        )
    if nearest(version) != version:
        edge = "LAST" if nearest(version) < version else "FIRST"
        lines.append(
            f"the table does not know {version}: it was compared with the rows of "
            f"{'.'.join(map(str, nearest(version)[:2]))}; once tests/launcher passes there too, "
            f"set {edge} and SUPPORTED in megatron_magi/launcher/hook_points.py, and "
            f"SUPPORTED_MINORS and SUPPORTED_TEXT in megatron_magi/adapter/compat.py"
        )
    return "\n".join(lines) or "every hook point fits"


if __name__ == "__main__":
    raise SystemExit(main())
