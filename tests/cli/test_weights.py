"""megatron-magi weights: its usage, the section that it prints, what it says of a conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_magi.training.recipe.run_values import ModelConfig
from megatron_magi.training.weights.weights_checkpoint import Converted
from tests.cli.command import Capture, run
from tests.training.llama_3_2 import LLAMA_3_2_1B, OURS

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more


def test_the_printed_section_is_a_recipe_of_that_model(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    code, out, _ = run(capsys, "weights", "import", str(tmp_path), "--print-recipe")
    assert code == 0
    (tmp_path / "recipe.yaml").write_text(out + "data:\n  path: x\n")
    recipe = pytest.importorskip(
        "megatron_magi.training.recipe.recipe", reason="reads YAML by omegaconf"
    )
    assert recipe.load_recipe(tmp_path / "recipe.yaml").model == OURS
    code, as_json, _ = run(capsys, "weights", "import", str(tmp_path), "--print-recipe", "--json")
    assert code == 0 and ModelConfig(**json.loads(as_json)["model"]) == OURS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["import", "x"], "weights import needs --recipe and --out, or --print-recipe"),
        (["import", "nowhere", "--print-recipe"], "needs config.json, got none in nowhere"),
        (["export", "x", "--out", "y", "--file-gib", "0"], "--file-gib must be above 0, got 0.0"),
        (["export", "x"], "the following arguments are required: --out"),
        (["imprt", "x"], "cannot be 'imprt'; did you mean import?"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else " ".join(x),
)
def test_wrong_usage(capsys: Capture, line: list[str], text: str) -> None:
    code, out, errors = run(capsys, "weights", *line)
    assert (code, out) == (2, "") and errors.count("\n") == 1 and text in errors


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path, int]]:
    """What the export was asked for; nothing is written."""
    asked: list[tuple[Path, Path, int]] = []

    def export(checkpoint: Path, out: Path, file_bytes: int) -> Converted:
        asked.append((checkpoint, out, file_bytes))
        return Converted(out, 1234, 3 * 2**20, "bfloat16", ("skipped iter_8",))

    monkeypatch.setattr("megatron_magi.training.weights.weights_checkpoint.export_weights", export)
    return asked


def test_an_export_says_what_it_wrote(
    capsys: Capture, exported: list[tuple[Path, Path, int]]
) -> None:
    """Notes on standard error in every form of the answer; the answer itself is the path alone, or
    one JSON object, where a program asks."""
    line = ("weights", "export", "x", "--out", "y", "--file-gib", "0.5")
    text = "1,234 tensors, 3.0 MiB of bfloat16, in y; its tokenizer is not in there\n"
    assert run(capsys, *line) == (0, text, "skipped iter_8\n")
    assert run(capsys, *line, "--quiet") == (0, "y\n", "skipped iter_8\n")
    code, out, err = run(capsys, *line, "--json")
    assert code == 0 and err == "skipped iter_8\n"
    facts = json.loads(out)
    assert (facts["path"], facts["num_tensors"], facts["dtype"]) == ("y", 1234, "bfloat16")
    assert exported == [(Path("x"), Path("y"), 2**29)] * 3


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "y"), "a place that it can write, got [Errno 28]"),
        (ImportError("no safetensors"), "needs megatron-core and omegaconf, got no safetensors"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_what_stops_a_conversion_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def export(*_: object) -> Converted:
        raise error

    monkeypatch.setattr("megatron_magi.training.weights.weights_checkpoint.export_weights", export)
    code, out, err = run(capsys, "weights", "export", "x", "--out", "y")
    assert (code, out) == (2, "") and err.count("\n") == 1 and text in err
