"""Reads a YAML recipe and key=value overrides into a `RunConfig`; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

PACKAGE = Path(__file__).parents[2]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply `overrides` ("section.key=value") and check every value.

    Args:
        path: of a YAML file, or the name of a packaged recipe.

    Raises:
        RecipeError: for a missing file, broken YAML, an unknown key (with the nearest known one),
            a value of the wrong type, or values that do not fit together.
    """
    return build_config([_read_yaml(find_recipe(path)), _parse_overrides(overrides)])


def build_config(parts: Iterable[DictConfig]) -> RunConfig:
    """Merge untyped parts, later ones winning, over the defaults of `RunConfig`."""
    schema = OmegaConf.structured(RunConfig)
    OmegaConf.set_readonly(schema, False)
    merged = schema
    for part in parts:
        _check_keys(part)
        try:
            merged = OmegaConf.merge(merged, _with_words(part))
        except OmegaConfBaseException as error:
            raise RecipeError(_type_error(error)) from None
    try:
        return cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise RecipeError(_type_error(error)) from None
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from None


def to_yaml(config: RunConfig) -> str:
    """The complete recipe of a run, defaults included."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise RecipeError(
            f"the recipe must be YAML, got {path}: {_one_line(error)}; mend it"
        ) from None
    if not isinstance(loaded, DictConfig):
        raise RecipeError(
            f"the recipe must be a mapping of keys, got a list or a bare value in {path}; "
            f"write 'section:' with 'key: value' below it"
        )
    return loaded


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item.lstrip("="):
            raise RecipeError(
                f"an override must look like section.key=value, got {item!r}; "
                f"for example train.iterations=20"
            )
        try:
            OmegaConf.from_dotlist([item])
        except Exception as error:  # PyYAML's own, or OmegaConf's
            raise RecipeError(
                f"the value of an override must be YAML, got {item!r} ({_one_line(error)}); put "
                f"text with brackets or colons in quotes"
            ) from None
    return OmegaConf.from_dotlist(list(overrides))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def schema_of(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of all sections and fields, with their types, in the dataclasses' order."""
    for name, kind in get_type_hints(cls).items():
        yield prefix + name, kind
        if is_dataclass(kind):
            yield from schema_of(cast(type, kind), f"{prefix}{name}.")


def _walk_keys(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, bool]]:
    for key, value in node.items():
        nested = isinstance(value, Mapping)
        yield f"{prefix}{key}", nested
        if nested:
            yield from _walk_keys(value, f"{prefix}{key}.")


def _check_keys(part: DictConfig) -> None:
    schema = dict(schema_of(RunConfig))
    plain = cast("dict[Any, Any]", OmegaConf.to_container(part))
    for key, nested in _walk_keys(plain):
        if key not in schema:
            raise RecipeError(
                f"every key of a recipe must be a field of RunConfig, got {key!r}; "
                f"{_suggest(key, schema)}"
            )
        if is_dataclass(schema[key]) and not nested:
            raise RecipeError(
                f"{key!r} must be a section with keys below it, got a bare value; "
                f"set one of {', '.join(_children(key, schema))}"
            )


def _with_words(part: DictConfig) -> DictConfig:
    """The same part, with YAML's false as the word "off" again in fields whose choices are words.

    YAML 1.1 reads on, off, yes and no as booleans. As other text they would silently become "True".
    """
    for key, kind in schema_of(RunConfig):
        value = OmegaConf.select(part, key)
        if isinstance(value, bool) and kind in (str, str | None):
            raise RecipeError(
                f"{key} must be text, got {str(value).lower()} (YAML's on, off, yes and no are "
                f"booleans); put it in quotes"
            )
        if get_origin(kind) is tuple and isinstance(value, ListConfig):
            _check_row(key, value)
        if value is False and "off" in get_args(kind):
            OmegaConf.update(part, key, "off")
    return part


def _check_row(key: str, row: ListConfig) -> None:
    """OmegaConf's own error does not say which list holds what."""
    for item in row:
        if type(item) is not int:
            raise RecipeError(
                f"{key} must have the type of its field, a row of whole numbers, got {item!r} in "
                f"it; write [1,300]"
            )


def _suggest(key: str, schema: Mapping[str, Any]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in schema if k.rsplit(".", 1)[-1] == leaf]
    as_deep = [k for k in schema if k.count(".") == key.count(".")]
    near = same_leaf or get_close_matches(key, as_deep, n=1, cutoff=0.7)
    if not near:
        leaves = {k.rsplit(".", 1)[-1]: k for k in schema}
        near = [leaves[m] for m in get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    if near:
        return f"did you mean {near[0]!r}?"
    parent = key.rpartition(".")[0]
    return f"known here: {', '.join(_children(parent, schema))}"


def _children(parent: str, schema: Mapping[str, Any]) -> list[str]:
    return [k for k in schema if k.rpartition(".")[0] == parent]


def _type_error(error: OmegaConfBaseException) -> str:
    reason = str(error.msg or error).splitlines()[0]
    key = error.full_key or "a key"
    return f"{key} must have the type of its field, got: {reason}; see training/recipe/"


def find_recipe(wanted: str | Path) -> Path:
    """The file that `wanted` means: a path as it is, a bare name one of the packaged recipes.

    Raises:
        RecipeError: an unknown name (with the nearest known one), or a path without a file.
    """
    path = Path(wanted)
    if path.is_file():
        return path
    packaged = packaged_recipes()
    if str(wanted) in packaged:
        return packaged[str(wanted)]
    near = [name for name in packaged if name.startswith(path.stem)]
    near += get_close_matches(path.stem, packaged, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"the recipe must be a YAML file or the name of a packaged one, got {wanted}, which is "
        f"neither; {hint}known: {', '.join(packaged)}"
    )


def packaged_recipes() -> dict[str, Path]:
    """Paths by name, sorted.

    A wheel has them inside the package (setup.py copies them); a checkout beside it.
    """
    folders = (PACKAGE / "recipes" / "own_trainer", PACKAGE.parent / "recipes" / "own_trainer")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
