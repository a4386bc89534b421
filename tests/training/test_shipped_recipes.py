"""Every recipe in recipes/own_trainer/ loads, fits its machine and has a true header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_magi.cli import train
from megatron_magi.cli.parser import CommandParser
from megatron_magi.training.estimate.dry_run import dry_run, report
from megatron_magi.training.recipe.recipe import load_recipe, packaged_recipes

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "own_trainer").glob("*.yaml"))
NAMES = {
    "tiny_llama_cpu",
    "llama3_180m_1gpu",
    "llama3_180m_256k_2gpu_cp2",
    "llama3_1b_1gpu",
    "llama3_1b_2gpu_cp2",
    "llama3_1b_32k_2gpu_cp2",
    "llama3_1b_4gpu_cp4",
    "llama3_1b_8gpu_cp8",
    "llama3_1b_openwebtext",
    "llama3_8b_64k_8gpu",
    "video_block_causal_4gpu",
}
NEVER_RUN = "NOT" + " RUN"
"""In two parts, so that a search for it finds recipes alone."""
H200_GIB = 139


def header(path: Path) -> dict[str, str]:
    """Comments before the first key: text by its label ("" for what the recipe is for)."""
    parts, label = {"": ""}, ""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        labelled = re.match(rf"# (machine|command|data|run|{NEVER_RUN}): (.*)", line)
        if labelled:
            label, line = labelled[1], labelled[2]
            assert label not in parts, f"{label} stands twice"
        parts[label] = f"{parts.get(label, '')} {line.lstrip('# ')}".strip()
    return parts


def num_gpus(path: Path) -> int:
    """What a recipe's name says it needs; 8 where it does not say."""
    said = re.search(r"_(\d+)gpu", path.stem)
    return int(said[1]) if said else 0 if path.stem.endswith("_cpu") else 8


def test_no_recipe_is_missing() -> None:
    assert {path.stem for path in RECIPES} == NAMES == set(packaged_recipes())


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_header_is_complete_and_its_command_starts_this_recipe(path: Path) -> None:
    parts = header(path)
    assert {"", "machine", "command", "data"} <= set(parts) and parts[""]
    assert ("run" in parts) != (NEVER_RUN in parts)
    assert (NEVER_RUN in parts) == (num_gpus(path) > 2)
    assert "Checked: " in parts.get(NEVER_RUN, "Checked: ")
    commands = (r"megatron-magi train (\S+)", r"bash scripts/launch_node\.sh (\S+)")
    started = [found[1] for pattern in commands if (found := re.match(pattern, parts["command"]))]
    assert started == [path.stem]
    assert load_recipe(started[0], ["data.path=nowhere"]).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_dry_run_fits_the_machine_and_the_header(path: Path) -> None:
    run = dry_run(load_recipe(path, ["data.path=nowhere"]))
    text = report(run, 0.4, 989.0)
    assert "assumed documents (no data at nowhere)" in text
    assert run.world_size == (num_gpus(path) or 2)
    assert max(m.total for m in run.memory) < H200_GIB * 2**30
    assert f"{run.tokens:,} tokens a step" in header(path)["data"]
    share = run.area / (run.config.train.global_batch_size * run.config.data.seq_length**2 / 2)
    assert (share > 0.9) == (run.config.data.mask == "causal")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_table_of_the_docs_says_the_same(path: Path) -> None:
    run = dry_run(load_recipe(path, ["data.path=nowhere"]))
    page = (ROOT / "docs" / "trainer/training.md").read_text()
    (row,) = re.findall(rf"^\| `{path.stem}` \| (.*) \|$", page, re.MULTILINE)
    gpus, tokens, steps, gib, was_run = row.split(" | ")
    assert gpus.split()[0] == str(run.world_size)
    assert tokens.endswith(f" = {run.tokens:,}")
    assert steps == f"{run.config.train.iterations:,}"
    estimate = max(m.total for m in run.memory) / 2**30
    assert float(gib) == pytest.approx(estimate, rel=0.1, abs=0.01)
    assert (was_run == "no") == (NEVER_RUN in header(path))
    assert (was_run == "not yet") == (header(path).get("run") == "pending")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_validates_on_samples_of_a_small_corpus(path: Path) -> None:
    """Held-out tokens of a corpus of 66 million are enough for one validation."""
    config = load_recipe(path)
    v, batch = config.validation, config.train.global_batch_size
    if v.interval is not None and "openwebtext" not in path.stem:
        assert v.batches * batch * config.data.seq_length < 0.8 * v.fraction * 66e6
        assert config.train.iterations % v.interval == 0


@pytest.mark.parametrize(
    "words",
    [
        ["a.yaml", "x.y=1", "z.w=2", "--dry-run", "--mfu", "0.5"],
        ["--dry-run", "a.yaml", "x.y=1", "--mfu", "0.5", "z.w=2"],
        ["a.yaml", "--mfu", "0.5", "x.y=1", "--dry-run", "z.w=2"],
    ],
    ids=["in_front", "around", "between"],
)
def test_overrides_stand_anywhere(words: list[str]) -> None:
    parser = CommandParser(prog="train")
    train.add_arguments(parser)
    options = parser.parse_args(words)
    assert (options.recipe, options.overrides) == ("a.yaml", ["x.y=1", "z.w=2"])
    assert options.dry_run and options.mfu == 0.5
