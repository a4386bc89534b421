"""Recipes: the flags of a pretrain script, in a YAML file.

    ENV_VARS:
      CUDA_DEVICE_MAX_CONNECTIONS: 1
    MODEL_ARGS:
      --num-layers: 16
      --swiglu: true
      --moe-layer-freq: ([0]+[1]*26)
      --data-path: "[${DATA:-}]"

The dialect is that of `model_config.yaml` in Megatron-LM's functional tests, whose files load
unchanged:

- A key is a flag of Megatron or of this package. A value is passed on as it is written.
- `true` is a flag without a value. `false` and an empty value leave the flag out.
- A list, or a text in square brackets, gives several values.
- `${NAME}` is a variable of the environment, `${NAME:-text}` one with a default.
  `${RECIPE_FOLDER}` is the folder of the file.
- ENV_VARS are set before Megatron is imported, except those that the environment has already.
- Other keys, such as TEST_TYPE, are ignored.

The file's flags replace `--recipe FILE` on the command line. A flag after it wins, because argparse
keeps the last value.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FLAG = "--recipe"
PACKAGE = Path(__file__).parent
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|([A-Za-z_]\w*))")


class RecipeFileError(ValueError):
    """A recipe that cannot be used; the message is one line with the remedy."""


def expand(words: Sequence[str]) -> list[str]:
    """Returns the command line with the flags of each `--recipe FILE` in its place.

    Sets the ENV_VARS of the files in the environment of this process.

    Raises:
        RecipeFileError: no such file, no MODEL_ARGS in it, or a variable that is not set.
    """
    expanded: list[str] = []
    rest = iter(words)
    for word in rest:
        name, _, wanted = word.partition("=")
        if name == FLAG:
            expanded += flags_of(find(wanted or next(rest, "")))
        else:
            expanded.append(word)
    return expanded


def packaged() -> dict[str, Path]:
    """Paths by name. A wheel has them inside the package, a checkout next to it."""
    folders = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(wanted: str) -> Path:
    """The file of that path, or the packaged recipe of that name.

    Raises:
        RecipeFileError: there is neither.
    """
    known = packaged()
    if not wanted or wanted.startswith("--"):
        raise RecipeFileError(f"{FLAG} requires a file or a name, got none; known: {_list(known)}")
    path = Path(wanted)
    if path.is_file():
        return path
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(path.stem, known, 1, cutoff=0.5)
    raise RecipeFileError(
        f"{FLAG} requires a YAML file or the name of a packaged recipe, got {wanted!r}; "
        + (f"did you mean {near[0]}? " if near else "")
        + f"known: {_list(known)}"
    )


def flags_of(path: Path) -> list[str]:
    """The words of a recipe's MODEL_ARGS, in order. Sets its ENV_VARS first.

    Raises:
        RecipeFileError: the file is no recipe, or needs a variable that is not set.
    """
    given = _read(path)
    _set_variables(given.get("ENV_VARS") or {}, path)
    flags = given.get("MODEL_ARGS")
    if not isinstance(flags, dict):
        raise RecipeFileError(
            f"a recipe requires a mapping MODEL_ARGS, got {', '.join(given) or 'nothing'} in "
            f"{path}; write the flags under MODEL_ARGS"
        )
    return [word for name, value in flags.items() for word in _words(name, value, path)]


def _set_variables(variables: Any, path: Path) -> None:
    lines = variables.items() if isinstance(variables, dict) else [("", variables)]
    for name, value in lines:
        if not name.isidentifier() or not isinstance(value, str) or "\0" in value:
            got = f"{name}: {value!r}" if name else value
            raise RecipeFileError(f"ENV_VARS requires NAME: value, got {got} in {path}; mend it")
        os.environ.setdefault(name, _with_environment(value, name, path))


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise RecipeFileError(f"{FLAG} requires PyYAML ({error}); pip install pyyaml") from error

    class AsWritten(yaml.SafeLoader):  # type: ignore[misc]
        """Leaves scalars as text: 1e-5, 1:30 and off are what the file says. Keeps merges."""

        yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            _refuse_second(node.value if isinstance(node, yaml.MappingNode) else [], path)
            return node

    try:
        given = yaml.load(path.read_text(encoding="utf-8"), AsWritten)
    except RecipeFileError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise RecipeFileError(f"a recipe must be YAML, got {path}: {said}; fix the file") from error
    return given if isinstance(given, dict) else {}


def _refuse_second(sections: list[Any], path: Path) -> None:
    """The last of two sections would silently replace the first."""
    names = [key.value for key, _ in sections]
    for name in ("ENV_VARS", "MODEL_ARGS"):
        if names.count(name) > 1:
            raise RecipeFileError(
                f"a recipe requires one mapping {name}, got {names.count(name)} in {path}; join "
                f"them"
            )


def _words(name: str, value: Any, path: Path) -> Iterator[str]:
    """The words of one flag, none if it is left out."""
    if not name.startswith("--"):
        raise RecipeFileError(
            f"a key of MODEL_ARGS must be a flag that begins with --, got {name} in {path}; "
            f"write it as the pretrain script takes it"
        )
    if isinstance(value, dict):
        raise RecipeFileError(
            f"{name} requires a value or a list, got a mapping in {path}; quote a text with braces"
        )
    if isinstance(value, list):
        values = [_with_environment(str(each), name, path) for each in value]
    else:
        text = _with_environment(value, name, path).strip()
        in_brackets = re.fullmatch(r"\[(.*)\]", text, re.DOTALL)
        values = in_brackets[1].split() if in_brackets else [text] if text else []
    if not values or values[0].lower() == "false":
        return
    if values[0].lower() == "true":
        yield name
    elif values[0].startswith("-"):  # argparse would take it for a flag
        yield f"{name}={values[0]}"
        yield from values[1:]
    else:
        yield from (name, *values)


def _with_environment(text: str, name: str, path: Path) -> str:
    def replaced(match: re.Match[str]) -> str:
        variable, default = match[1] or match[3], match[2]
        found = os.environ.get(variable) or default
        if variable == "RECIPE_FOLDER":
            found = str(path.resolve().parent)
        if found is None:
            raise RecipeFileError(
                f"{path} requires the variable {variable} of the environment for {name}, got "
                f"none; export {variable}"
            )
        return found

    return _VARIABLE.sub(replaced, text)


def _list(known: dict[str, Path]) -> str:
    return ", ".join(known) or "none"
