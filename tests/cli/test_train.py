"""megatron-magi train: what is refused before a run, and how a rank of it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_magi.cli import main, train
from megatron_magi.training.process.processes import Place
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from tests.cli.command import Capture, run

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

PLACE = Place(rank=1, world_size=2, local_rank=1)
TINY = "tiny_llama_cpu"


@pytest.fixture(autouse=True)
def a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_other_ranks_let_the_first_one_report(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The launcher stops everybody when one ends."""
    pytest.importorskip("omegaconf", reason="recipes need it")
    monkeypatch.setenv("WORLD_SIZE", "2")
    slept: list[float] = []
    monkeypatch.setattr(train.time, "sleep", slept.append)
    said = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(["train", TINY, "parallel.cp=3"]) == 2
        said.append(capsys.readouterr().err.count("the number of processes must be"))
    assert said == [1, 0] and slept == [train.SECONDS_TO_REPORT]


def test_training_without_megatron_core_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pytest.importorskip("omegaconf", reason="recipes need it")
    monkeypatch.setitem(sys.modules, "megatron_magi.adapter", None)
    assert main(["train", "tiny_llama_cpu", "data.path=x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: training needs megatron-core") and err.count("\n") == 1


def config_of(*overrides: str) -> RunConfig:
    recipe = pytest.importorskip(
        "megatron_magi.training.recipe.recipe", reason="reads YAML by omegaconf"
    )
    return recipe.load_recipe(TINY, list(overrides))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RecipeError("a recipe"), "error: rank 1: a recipe\n"),
        (OSError(28, "No space left", "x"), "error: rank 1: files and streams of a run must be"),
    ],
    ids=["recipe", "disk"],
)
def test_an_expected_error_ends_a_rank_in_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Inside its process groups, which then know that it failed."""
    left: list[object] = []

    @contextmanager
    def groups(config: RunConfig, place: Place) -> Iterator[None]:
        try:
            yield
        except SystemExit as end:
            left.append(end.code)
            raise

    def fail(config: RunConfig) -> None:
        raise error

    monkeypatch.setattr(train, "process_groups", groups)
    monkeypatch.setattr("megatron_magi.training.run.loop.train", fail)
    with pytest.raises(SystemExit):
        train.run_rank(config_of(), PLACE)
    err = capsys.readouterr().err
    assert left == [1] and err.startswith(text) and err.count("\n") == 1


def test_a_run_starts_its_ranks_or_joins_torchruns(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    started, joined = [], []
    monkeypatch.setattr(train, "_check_start", lambda config, place: config_of())
    monkeypatch.setattr(train, "run_local", lambda work, count: started.append(count) or 7)
    monkeypatch.setattr(train, "run_rank", lambda config, place: joined.append(place.rank))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(capsys, "train", TINY, "parallel.cp=3", "parallel.dp=2")[0] == 7
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert run(capsys, "train", TINY, "parallel.cp=3")[0] == 0
    assert (started, joined) == ([6], [4])


def test_only_the_first_rank_prints(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    config_of()
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        code, out, err = run(capsys, "train", TINY, "--print-config")
        assert (code, err) == (0, "")
        said.append("global_batch_size:" in out)
    assert said == [True, False]


def test_a_folder_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    config_of()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("megatron_magi.training.data.packed_samples.check_files", lambda data: None)
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "train", TINY, "data.path=x", "log.dir=file")
    assert code == 2 and "a run needs a folder that it can write, got" in err, err
    assert "; set log.dir" in err and err.count("\n") == 1
