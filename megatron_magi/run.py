"""Run a Megatron pretrain script with magi's attention behind one of its own flags.

    python -m megatron_magi.run PATH/pretrain_gpt.py <its flags> --attention-backend magi

Without `--attention-backend magi` the script runs as it is. `--recipe FILE` stands for the flags in
a YAML file (`megatron_magi.recipe`). The script `pretrain_gpt`, without .py, is a packaged one for
people who have the megatron-core wheel and no checkout of Megatron-LM.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_magi import recipe

USAGE = (
    "usage: python -m megatron_magi.run PATH/pretrain_gpt.py <its flags> --attention-backend magi"
)
PACKAGED = "pretrain_gpt"
"""Name of the packaged script, where no file has that name: examples/pretrain_gpt.py."""


def main(argv: list[str] | None = None) -> None:
    """Install the hooks that the flags ask for, then run the script as `__main__`.

    Args:
        argv: The script's path and its flags; default: this process's.
    """
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in ("-h", "--help"):
        print(_help())
        return
    if not given or given[0].startswith("-"):
        raise SystemExit(f"{USAGE}\nerror: a script is required first, got {given[:1] or 'none'}")
    script = find_script(given[0])
    if not script.is_file():
        raise SystemExit(
            f"{USAGE}\nerror: the script must exist, got {given[0]!r} in {Path.cwd()}, and there "
            f"is no such file; give its path, or {PACKAGED} for the packaged one"
        )
    script = script.resolve()
    try:
        flags = recipe.expand(given[1:])
    except recipe.RecipeFileError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))  # as Python does for a script; Megatron's root
    try:
        from megatron_magi.launcher import install

        install()
    except ImportError as error:
        raise SystemExit(f"megatron_magi.run: {error}") from error

    runpy.run_path(str(script), run_name="__main__")


def find_script(name: str) -> Path:
    """Returns the path of a script; for `pretrain_gpt`, of the packaged one.

    A wheel has it inside the package, a checkout next to it.
    """
    if name != PACKAGED or Path(name).exists():
        return Path(name)
    inside = recipe.PACKAGE / "examples" / f"{PACKAGED}.py"
    return inside if inside.is_file() else recipe.PACKAGE.parent / "examples" / inside.name


def _help() -> str:
    """The usage and magi's flags; Megatron's own flags are shown by the script's --help."""
    from megatron_magi.launcher.flags import flag_parser

    return (
        f"{USAGE}\n\nmagi's flags, in addition to the script's own:\n{flag_parser().format_help()}"
        f"  {recipe.FLAG} FILE\n"
        f"                        a YAML file of flags, or one of: {', '.join(recipe.packaged())}\n"
    )


if __name__ == "__main__":
    main()
