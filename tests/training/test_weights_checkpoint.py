"""HuggingFace weights and checkpoints of ours hold the same bits and compute the same function."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_worker import run_jobs_of
from tests.training import tiny_hf

pytestmark = pytest.mark.slow

pytest.importorskip("safetensors", reason="the conversion reads and writes its files")

JOBS = Path(__file__).parent / "weights_jobs.py"
TIMEOUT_S = 280
RELATIVE = 2e-5


FOLDERS: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {
    "untied": (tiny_hf.hf_config(), torch.float32, 1),
    "tied": (tiny_hf.hf_config(tie_word_embeddings=True), torch.bfloat16, 3),
    "half": (tiny_hf.hf_config(rope_scaling=None, num_key_value_heads=4), torch.float16, 2),
}
"""config.json, dtype and number of files."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2_sharded": {"dp": 2, "distributed_optimizer": True},
}
BF16: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {
        "dp": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
TRAINED = ("tied", "untied")
STARTED = [("untied", name) for name in LAYOUTS] + [("tied", n) for n in ("cp1", "tp2", "pp2")]
"""(folder, layout) of runs that start from imported weights."""


def model_section(c: dict[str, Any]) -> dict[str, Any]:
    """The model section of `c`, its vocabulary padded to 384 rows."""
    scaling = c["rope_scaling"] or {}
    return {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "ffn_hidden_size": c["intermediate_size"],
        "num_attention_heads": c["num_attention_heads"],
        "num_query_groups": c["num_key_value_heads"],
        "head_dim": c["head_dim"],
        "vocab_size": c["vocab_size"],
        "rope_scaling": bool(scaling),
        "rope_scaling_factor": scaling.get("factor", 8.0),
        "norm_epsilon": c["rms_norm_eps"],
        "tie_embeddings": c["tie_word_embeddings"],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def results(folder: Path, tiny_recipe: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    def recipe(name: str, kind: str, **sections: Any) -> dict[str, Any]:
        train = {"iterations": 3, "global_batch_size": 2, **sections.pop("train", {})}
        model = {**model_section(FOLDERS[kind][0]), **sections.pop("model", {})}
        load = {"load": str(folder / f"{kind}-0.5"), **sections.pop("checkpoint", {})}
        return tiny_recipe(name, folder, model=model, train=train, checkpoint=load, **sections)

    def run(name: str, kind: str, **sections: Any) -> dict[str, Any]:
        p = sections.get("parallel", {})
        world = p.get("tp", 1) * p.get("pp", 1) * p.get("cp", 1) * p.get("dp", 1)
        kwargs = {"recipe": recipe(name, kind, **sections)}
        return {"name": name, "function": "train", "kwargs": kwargs, "world": world}

    def job(name: str, function: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": name, "function": function, "kwargs": kwargs, "world": 1}

    lines = []
    for kind, (c, dtype, files) in FOLDERS.items():
        tensors = tiny_hf.random_tensors(c, dtype)
        tiny_hf.write_folder(folder / f"{kind}-hf", c, tensors, files)
        text = json.dumps(recipe("convert", kind))  # JSON is YAML
        (folder / f"{kind}.yaml").write_text(text)
        given, ours = str(folder / f"{kind}-hf"), str(folder / f"{kind}-0.5")
        lines += [
            ["import", given, "--recipe", str(folder / f"{kind}.yaml"), "--out", ours],
            ["export", ours, "--out", str(folder / f"{kind}-back"), "--file-gib", "3e-5"],
        ]
    refused = [
        ["import", given, "--recipe", str(folder / "tied.yaml"), "--out", str(folder / "new")],
        ["import", given, "--recipe", str(folder / "half.yaml"), "--out", ours],
        ["export", str(folder / "nowhere"), "--out", str(folder / "new")],
    ]
    bf16 = {"dtype": "bf16"}
    trained = {
        kind: run(
            f"trained_{kind}",
            kind,
            train={"iterations": 2, **bf16},
            checkpoint={"load": None, "interval": 2},
        )
        for kind in TRAINED
    }
    back = []
    for kind in TRAINED:
        own, hf = str(folder / f"trained_{kind}" / "checkpoints"), str(folder / f"{kind}-out")
        again = ["--recipe", str(folder / f"{kind}.yaml"), "--out", str(folder / f"{kind}-again")]
        back += [["export", own, "--out", hf], ["import", hf, *again]]
    return run_jobs_of(
        JOBS,
        [
            job("convert", "command", lines=lines),
            job("refused", "command", lines=refused),
            *(
                job(f"logits_{k}", "logits", recipe=recipe("l", k), out=str(folder / f"{k}.pt"))
                for k in FOLDERS
            ),
            *(run(f"{kind}_{name}", kind, parallel=LAYOUTS[name]) for kind, name in STARTED),
            *(
                run(f"bf16_{name}", "untied", parallel=parallel, train=bf16)
                for name, parallel in BF16.items()
            ),
            run("own", "untied", checkpoint={"interval": 1}, train={"iterations": 2}),
            run("own", "untied", checkpoint={"load": "latest"}, train={"iterations": 3})
            | {"name": "own_latest"},
            run("other_shape", "untied", model={"ffn_hidden_size": 64}),
            *trained.values(),
            job("back", "command", lines=back),
            *(
                job(
                    f"differences_{kind}",
                    "weight_differences",
                    recipe=recipe("d", kind),
                    before=str(folder / f"trained_{kind}" / "checkpoints" / "iter_0000002"),
                    after=str(folder / f"{kind}-again"),
                )
                for kind in TRAINED
            ),
        ],
        folder,
        TIMEOUT_S,
    )


def values(results: dict[str, Any], name: str) -> Any:
    result = results[name]
    assert "error" not in result, result["error"]
    assert all(answer == result["values"][0] for answer in result["values"])
    return result["values"][0]


def losses(results: dict[str, Any], name: str) -> list[float]:
    return [float.fromhex(row[1]) for row in values(results, name)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_hf_to_ours_to_hf_is_bit_by_bit(results: dict[str, Any], folder: Path, kind: str) -> None:
    for code, out, errors in values(results, "convert"):
        assert (code, errors) == (0, ""), errors
        assert " tensors, " in out
    before = tiny_hf.read_folder(folder / f"{kind}-hf")
    after = tiny_hf.read_folder(folder / f"{kind}-back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_exported_config_says_the_same_model(
    results: dict[str, Any], folder: Path, kind: str
) -> None:
    c, dtype, _ = FOLDERS[kind]
    written = json.loads((folder / f"{kind}-back" / "config.json").read_text())
    assert {key: written[key] for key in c} == c
    assert written["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert written["eos_token_id"] == 256
    assert written["max_position_embeddings"] == (96 if kind == "half" else 8192 * 32)
    index = json.loads((folder / f"{kind}-back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["weight_map"].keys() == tiny_hf.shapes(c).keys()


@pytest.mark.parametrize("kind", TRAINED)
def test_ours_to_hf_to_ours_is_bit_by_bit(results: dict[str, Any], kind: str) -> None:
    assert [errors for _, _, errors in values(results, "back")] == [""] * 4
    compared, different, padding = values(results, f"differences_{kind}")
    assert compared == (8 if kind == "tied" else 9)  # the layers of a kind are one tensor
    assert (different, padding) == ([], 0.0)


def documents(folder: Path, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, logits of ours without padding) of each document of a sample."""
    tokens, borders, found = torch.load(folder / f"{kind}.pt")
    assert len(borders) > 2 and found.shape == (len(tokens), 384)
    used = FOLDERS[kind][0]["vocab_size"]
    return [(tokens[begin:end], found[begin:end, :used]) for begin, end in pairwise(borders)]


def difference(kind: str, folder: Path, **changes: Any) -> float:
    """Largest relative difference to the forward of tiny_hf, with `changes` of its config.json."""
    c = {**FOLDERS[kind][0], **changes}
    weights = {n: t.float() for n, t in tiny_hf.read_folder(folder / f"{kind}-hf").items()}
    worst = 0.0
    for tokens, found in documents(folder, kind):
        wanted = tiny_hf.logits(c, weights, tokens)
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst


@pytest.mark.parametrize("kind", FOLDERS)
def test_logits_are_those_of_a_plain_llama(
    results: dict[str, Any], folder: Path, kind: str
) -> None:
    values(results, f"logits_{kind}")
    assert difference(kind, folder) < 5e-6


def test_that_comparison_sees_scaling_and_epsilon(results: dict[str, Any], folder: Path) -> None:
    factor_8 = {**tiny_hf.LLAMA3, "factor": 8.0}
    for changes in ({"rope_scaling": factor_8}, {"rope_scaling": None}, {"rms_norm_eps": 1e-5}):
        assert difference("untied", folder, **changes) > 5e-5, changes


@pytest.mark.parametrize("kind", FOLDERS)
def test_logits_are_those_of_transformers(results: dict[str, Any], folder: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with its Llama")
    values(results, f"logits_{kind}")
    for source in ("hf", "back"):
        path = folder / f"{kind}-{source}"
        llama = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for tokens, found in documents(folder, kind):
            with torch.no_grad():
                wanted = llama(tokens[None]).logits[0]
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 5e-6


@pytest.mark.parametrize(("kind", "name"), [s for s in STARTED if s[1] != "cp1"])
def test_every_layout_starts_from_the_same_weights(
    results: dict[str, Any], kind: str, name: str
) -> None:
    found, wanted = losses(results, f"{kind}_{name}"), losses(results, f"{kind}_cp1")
    assert found == pytest.approx(wanted, rel=RELATIVE)


def test_a_start_is_iteration_0_and_says_so(results: dict[str, Any], folder: Path) -> None:
    assert [row[0] for row in values(results, "untied_cp1")] == [1, 2, 3]
    assert (
        f"started from imported weights: {folder / 'untied-0.5'}, at iteration 0 with a fresh "
        f"optimizer and schedule" in results["output"]
    )


@pytest.mark.parametrize("name", BF16)
def test_bf16_updates_the_loaded_weights(results: dict[str, Any], name: str) -> None:
    """Main weights of a random start would undo the loaded ones in the first update."""
    found, wanted = losses(results, f"bf16_{name}"), losses(results, "untied_cp1")
    assert found == pytest.approx(wanted, rel=5e-3)


def test_latest_still_means_the_run_of_its_own(results: dict[str, Any]) -> None:
    whole = values(results, "untied_cp1")
    assert values(results, "own") == whole[:2]
    assert values(results, "own_latest") == whole[2:]


def test_weights_of_another_shape_are_refused(results: dict[str, Any]) -> None:
    error = values(results, "other_shape")
    assert error.startswith("RecipeError: model, precision and optimizer must be those of the")
    assert "model.ffn_hidden_size 64 (saved: 48)" in error and "dtype" not in error


def test_the_command_refuses_in_one_sentence(results: dict[str, Any], folder: Path) -> None:
    texts = (
        "model.num_query_groups 2 (there: 4), model.rope_scaling True (there: False), "
        "model.tie_embeddings True (there: False); take the section that --print-recipe prints",
        f"needs a folder that is new or empty, got {folder / 'half-0.5'}; remove it",
        f"an export needs a whole checkpoint, got none in {folder / 'nowhere'}",
    )
    for (code, out, errors), text in zip(values(results, "refused"), texts, strict=True):
        assert (code, out) == (2, "") and errors.count("\n") == 1 and text in errors
    assert not (folder / "new").exists()
