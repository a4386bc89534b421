"""`--recipe FILE`: Megatron's YAML dialect becomes flags on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron_magi import recipe, run
from megatron_magi.recipe import RecipeFileError, expand, flags_of

TEXT = """
ENV_VARS:
  MAGI_TEST_SET: 1
  MAGI_TEST_KEPT: from the file
MODEL_ARGS:
  --num-layers: 16
  --swiglu: true
  --bf16: false
  --lr: 1e-5
  --exit: 1:30
  --log: off
  --spec: "[module  function]"
  --betas: [0.9, 0.95]
  --moe-layer-freq: ([0]+[1]*26)
  --prompt: two words
  --pattern: -M*-
  --data-path: "[${MAGI_TEST_DATA}]"
  --load: ${MAGI_TEST_LOAD:-/tmp/x}/y
  --save: ${MAGI_TEST_SAVE:-}
  --plain: $MAGI_TEST_DATA
METRICS: [ignored]
"""
WORDS = [
    *("--num-layers", "16", "--swiglu", "--lr", "1e-5", "--exit", "1:30", "--log", "off"),
    *("--spec", "module", "function", "--betas", "0.9", "0.95"),
    *("--moe-layer-freq", "([0]+[1]*26)", "--prompt", "two words", "--pattern=-M*-"),
    *("--data-path", "0.3", "a", "0.7", "b", "--load", "/tmp/x/y", "--plain", "0.3 a 0.7 b"),
]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "environ", {"MAGI_TEST_DATA": "0.3 a 0.7 b", "MAGI_TEST_KEPT": "mine"})
    file = tmp_path / "job.yaml"
    file.write_text(TEXT)
    return file


def test_values_become_words_as_they_are_written(path: Path) -> None:
    assert flags_of(path) == WORDS


def test_variables_are_set_unless_the_user_set_them(path: Path) -> None:
    flags_of(path)
    assert (os.environ["MAGI_TEST_SET"], os.environ["MAGI_TEST_KEPT"]) == ("1", "mine")


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_the_flags_stand_where_the_recipe_stood(path: Path, form: str) -> None:
    second = path.with_name("second.yaml")
    second.write_text("MODEL_ARGS: {--num-layers: 4}")
    given = ["--recipe", str(path)] if form == "two words" else [f"--recipe={path}"]
    words = expand(["--seed", "7", *given, "--recipe", str(second), "--num-layers", "2"])
    assert words == ["--seed", "7", *WORDS, "--num-layers", "4", "--num-layers", "2"]
    assert expand(words) == words


def test_merged_mappings_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text("BASE: &base {--a: 1}\nMODEL_ARGS: {<<: *base, --b: 2}")
    assert flags_of(file) == ["--a", "1", "--b", "2"]


BROKEN = {
    "no mapping": ("- a", "requires a mapping MODEL_ARGS, got nothing in"),
    "no flags": ("ENV_VARS: {A: 1}", "requires a mapping MODEL_ARGS, got ENV_VARS in"),
    "no yaml": ("MODEL_ARGS: {a: [", "must be YAML, got .*; fix the file"),
    "no flag": ("MODEL_ARGS: {lr: 1}", "must be a flag that begins with --, got lr in"),
    "deep": ("MODEL_ARGS: {--a: {b: 1}}", "--a requires a value or a list, got a mapping in"),
    "list of variables": ("ENV_VARS: [A=1]", r"ENV_VARS requires NAME: value, got \['A=1'\] in"),
    "no name": ("ENV_VARS: {A=B: 1}", "requires NAME: value, got A=B: '1' in"),
    "deep variable": ("ENV_VARS: {A: {b: 1}}", "requires NAME: value, got A: {'b': '1'} in"),
    "nul": ('ENV_VARS: {MAGI_NUL: "b\\0"}', r"NAME: value, got MAGI_NUL: 'b\\x00' in"),
    "twice": ("MODEL_ARGS: {--a: 1}\nMODEL_ARGS: {--b: 1}", "one mapping MODEL_ARGS, got 2 in"),
    "unset": ("MODEL_ARGS: {--a: '${MAGI_NO}'}", "variable MAGI_NO .* for --a, got none; export"),
}


@pytest.mark.parametrize(("text", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_recipe_is_one_line(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(RecipeFileError, match=says) as error:
        expand(["--recipe", str(path)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe"], "requires a file or a name, got none; known: "),
        (["--recipe", "--lr", "1"], "requires a file or a name, got none; known: "),
        (["--recipe", "tiny_lama_cpu"], "got 'tiny_lama_cpu'; did you mean tiny_llama_cpu"),
        (["--recipe", "x/qqqqqqqqqqq.yaml"], "got 'x/qqqqqqqqqqq.yaml'; known: "),
    ],
)
def test_an_unknown_recipe_lists_what_there_is(words: list[str], says: str) -> None:
    with pytest.raises(RecipeFileError, match=re.escape(says)):
        expand(words)


def test_the_run_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    with pytest.raises(SystemExit) as end:
        run.main([str(script), "--recipe", "none.yaml"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --recipe requires a YAML file") and err.count("\n") == 1


def test_a_wheel_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named recipes next to an installed package is another project's."""
    for folder, name in (("package/recipes", "inside"), ("recipes", "outside")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.yaml").touch()
    monkeypatch.setattr(recipe, "PACKAGE", tmp_path / "package")
    assert list(recipe.packaged()) == ["inside"]
