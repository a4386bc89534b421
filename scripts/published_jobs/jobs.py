"""The training jobs of a Megatron-LM checkout: its functional tests and its example scripts."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

import yaml

SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py")
"""Training scripts that the launcher starts; the last is an older name of the second."""

SCRIPT_OF_FOLDER = {
    "gpt": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "mixtral": "pretrain_gpt.py",
    "hybrid": "pretrain_hybrid.py",
    "mamba": "pretrain_hybrid.py",
    "nemotron": "pretrain_hybrid.py",
    "gpt-nemo": "nemo",
    "common": "tools",
}
"""What runs the tests of a folder that no recipe names; another folder has its own script."""

TESTS = Path("tests/functional_tests/test_cases")
RECIPES = Path("tests/test_utils/recipes")
SCRIPT_IN_RECIPE = re.compile(r"TRAINING_SCRIPT_PATH=\S*?([\w.-]+\.py)")
VARIABLES = {"REPEAT": "1", "TOKENIZER_TYPE": "HuggingFaceTokenizer"}
"""Variables that the test runner sets and that the parser does not take as they are written."""

ARGUMENT_KEYS = re.compile(r"MODEL_ARGS(_\d+)?$")


@dataclass(frozen=True)
class Job:
    """A command line that somebody publishes for one of our scripts."""

    name: str
    """Where it stands, below the folder of its kind."""
    kind: Literal["test", "example"]
    script: str
    words: tuple[str, ...]
    """What follows the script; shell variables stay as they are written."""
    is_active: bool = False
    """A recipe of continuous integration runs it, in a scope that is not broken or disabled."""
    is_release: bool = False
    """A long run whose convergence is compared before a release."""
    num_places: int = 1
    """How many files hold it."""


@dataclass
class Found:
    """Jobs, and how many were left out for which reason."""

    jobs: list[Job] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, other: Found) -> None:
        """Take what another search found."""
        self.jobs += other.jobs
        self.left_out += other.left_out


class _Words(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose scalars stay as written: a command line has words and no floats."""


_Words.yaml_implicit_resolvers = {
    "<": [r for r in yaml.SafeLoader.yaml_implicit_resolvers["<"] if r[0].endswith(":merge")]
}


def find_tests(megatron: Path) -> Found:
    """Functional tests that train by one of our scripts."""
    found, scripts, active = Found(), *read_recipes(megatron / RECIPES)
    for path in sorted((megatron / TESTS).rglob("model_config.yaml")):
        name = path.parent.relative_to(megatron / TESTS).as_posix()
        settings = yaml.load(path.read_text(), _Words)
        folder = name.partition("/")[0]
        script = scripts.get(name) or SCRIPT_OF_FOLDER.get(folder, f"a script for {folder}")
        reason = _why_not(settings, script)
        if reason:
            found.left_out[reason] += 1
            continue
        release = settings.get("TEST_TYPE") == "release"
        for key in filter(ARGUMENT_KEYS.match, settings):
            words = tuple(words_of(settings[key]))
            title = name + key.removeprefix("MODEL_ARGS")
            found.jobs.append(Job(title, "test", script, words, name in active, release))
    return found


def _why_not(settings: dict[str, Any], script: str) -> str:
    """Why a test is none of our jobs; empty if it is one."""
    mode = settings.get("MODE", "pretraining")
    if mode not in ("pretraining", "training"):
        return mode
    return "" if script in SCRIPTS else f"run by {script}"


def read_recipes(folder: Path) -> tuple[dict[str, str], set[str]]:
    """(the training script of each test that a recipe names, the tests that are active)."""
    scripts: dict[str, str] = {}
    active: set[str] = set()
    for path in sorted(folder.rglob("*.yaml")):
        recipe = yaml.load(path.read_text(), _Words) or {}
        spec = recipe.get("spec", {})
        script = SCRIPT_IN_RECIPE.search(spec.get("script", ""))
        if script is None:
            continue
        for product in recipe.get("products") or []:
            names = [f"{spec['model']}/{case}" for case in product["test_case"]]
            scripts |= dict.fromkeys(names, script.group(1))
            if any(map(_runs, _scopes(product.get("products") or []))):
                active.update(names)
    return scripts, active


def _scopes(products: Iterable[dict[str, Any]]) -> Iterator[str]:
    for product in products:
        yield from product.get("scope", [])


def _runs(scope: str) -> bool:
    return not scope.endswith(("broken", "disabled", "deprecated", "flaky"))


def words_of(settings: dict[str, Any] | None) -> Iterator[str]:
    """The words of a command line, as Megatron's test runner makes them of a table of flags."""
    for flag, value in (settings or {}).items():
        text = " ".join(value) if isinstance(value, list) else str(value).strip()
        text = Template(text).safe_substitute(VARIABLES)
        if text in ("", "None"):
            continue
        yield flag
        if text == "true":
            continue
        if re.fullmatch(r"\[[^]]+\]", text):
            yield from text[1:-1].split()
        elif re.search(r"[ |()]", text):
            yield text.strip("'\"")
        else:
            yield from shlex.split(text)


def without_repeats(jobs: Iterable[Job]) -> list[Job]:
    """Jobs with other words only; one that stands in several places keeps its first name."""
    kept: dict[tuple[str, tuple[tuple[str, ...], ...]], Job] = {}
    for job in jobs:
        key = job.script, tuple(sorted(flags_of(job.words)))
        kept[key] = _joined(kept[key], job) if key in kept else job
    return list(kept.values())


def _joined(first: Job, job: Job) -> Job:
    return replace(
        first,
        is_active=first.is_active or job.is_active,
        is_release=first.is_release or job.is_release,
        num_places=first.num_places + job.num_places,
    )


def flags_of(words: Iterable[str]) -> list[tuple[str, ...]]:
    """Each flag with its values; `--flag=value` counts as two words."""
    flags: list[tuple[str, ...]] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            flags.append((flag, value) if equals else (flag,))
        elif flags:
            flags[-1] += (word,)
    return flags
