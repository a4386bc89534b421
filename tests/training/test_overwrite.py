"""A run from the start leaves the steps.csv of another run alone unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.cli import main
from megatron_magi.training.checkpoint.checkpoint_folder import (
    checkpoint_folder,
    finish,
    open_partial,
)
from megatron_magi.training.recipe.recipe import build_config, to_yaml
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run.overwrite import check_overwrite


def config_of(folder: Path, **sections: Any) -> RunConfig:
    from omegaconf import OmegaConf

    sections["log"] = {"dir": str(folder), **sections.get("log", {})}
    return build_config([OmegaConf.create({"name": "a", "data": {"path": "x"}, **sections})])


def leave_steps(config: RunConfig, num_steps: int = 2) -> Path:
    """What RunLog leaves of a run of so many steps."""
    folder = Path(config.log.dir) / config.name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(config))
    path = folder / "steps.csv"
    path.write_text("iteration,lm_loss\n" + "".join(f"{i + 1},2.0\n" for i in range(num_steps)))
    return path


def test_another_runs_steps_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    path = leave_steps(config_of(tmp_path), num_steps=1200)
    with pytest.raises(RecipeError) as error:
        check_overwrite(config_of(tmp_path, train={"seed": 5}))
    for text in (f"1,200 iterations in {path};", "name=", "log.overwrite=true", "load=auto"):
        assert text in str(error.value)


@pytest.mark.parametrize(
    "sections",
    [{"name": "b"}, {"log": {"overwrite": True}}, {"log": {"csv": False}}],
    ids=["name", "overwrite", "no_csv"],
)
def test_ways_out(tmp_path: Path, sections: dict[str, Any]) -> None:
    leave_steps(config_of(tmp_path))
    check_overwrite(config_of(tmp_path, **sections))


def test_a_run_that_never_made_a_step_is_nothing_to_lose(tmp_path: Path) -> None:
    leave_steps(config_of(tmp_path), num_steps=0)
    check_overwrite(config_of(tmp_path))


def test_a_resumed_run_goes_on_and_a_missing_checkpoint_is_its_own_error(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"load": "latest"})
    leave_steps(config)
    with pytest.raises(RecipeError, match="needs a whole checkpoint"):
        check_overwrite(config)
    finish(open_partial(checkpoint_folder(config), 1), config, 1, 8, 1)
    check_overwrite(config)
    check_overwrite(config_of(tmp_path, checkpoint={"load": "auto"}, train={"seed": 5}))
    with pytest.raises(RecipeError, match="a name of its own"):  # it would not be resumed
        check_overwrite(config_of(tmp_path))


def test_a_job_started_again_before_it_saved_is_the_same_run(tmp_path: Path) -> None:
    """A scheduler repeats the command; another recipe of that name is another run."""
    auto = {"load": "auto"}
    leave_steps(config_of(tmp_path, checkpoint=auto))
    check_overwrite(config_of(tmp_path, checkpoint=auto))
    with pytest.raises(RecipeError, match="a name of its own"):
        check_overwrite(config_of(tmp_path, checkpoint=auto, train={"seed": 5}))


def test_a_dry_run_says_it_below_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    leave_steps(config_of(tmp_path, name="tiny_llama_cpu"))
    command = ["train", "tiny_llama_cpu", "--dry-run", "data.path=x", f"log.dir={tmp_path}"]
    assert main([*command, "name=b"]) == 0
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out.count("dry run: nothing was started") == 2
    assert err.startswith("error: a run from the start needs a name of its own")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("megatron_magi.training.data.packed_samples.check_files", lambda data: None)
    (tmp_path / "file").touch()
    assert main(["train", "tiny_llama_cpu", "data.path=x", f"log.dir={tmp_path}/file"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: a run needs a folder that it can write, got")
    assert err.endswith("; set log.dir\n")


@pytest.mark.slow
def test_every_rank_of_a_started_world_says_so(
    tmp_path: Path,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """In the same words, nobody waiting in a collective; and one that is told to replaces it."""

    def job(name: str, log: dict[str, Any]) -> dict[str, Any]:
        recipe = tiny_recipe("same", tmp_path, parallel={"cp": 2}, log=log)
        return {"name": name, "function": "train", "kwargs": {"recipe": recipe}, "world": 2}

    results = run_training_jobs(
        [job("first", {}), job("again", {}), job("told", {"overwrite": True})]
    )
    first, again, told = (results[name]["values"] for name in ("first", "again", "told"))
    assert again[0] == again[1] and again[0].startswith("RecipeError: a run from the start needs")
    assert f"6 iterations in {tmp_path / 'same' / 'steps.csv'}" in again[0]
    assert told == first
