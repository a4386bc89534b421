"""Gradients that Megatron saved, in one layout or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi.compare.gradient_errors import Baseline, gradient_errors
from megatron_magi.compare.run_error import RunError
from megatron_magi.compare.wgrads import read_wgrads, saved_iterations

HIDDEN, FFN, ROWS = 4, 6, 8
LAYERS = 4
SIZES = {
    "self_attention.linear_qkv.weight": (12, HIDDEN),
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_proj.weight": (HIDDEN, 8),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
    "mlp.linear_fc2.bias": (HIDDEN,),
}
Model = dict[str, torch.Tensor]


def model(noise: float = 0.0) -> Model:
    torch.manual_seed(0)
    sizes = {"embedding.word_embeddings.weight": (ROWS, HIDDEN)}
    for layer in range(LAYERS):
        sizes |= {f"decoder.layers.{layer}.{name}": size for name, size in SIZES.items()}
    sizes["decoder.final_layernorm.weight"] = (HIDDEN,)
    return {name: torch.randn(size) * (1 + noise) for name, size in sizes.items()}


def shard(name: str, whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """What a tensor-parallel rank has of a parameter."""
    if "norm" in name or name.endswith("bias"):
        return whole
    if "linear_fc1" in name:  # gate and up are split one by one
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole.chunk(tp, dim=1 if "proj" in name or "fc2" in name else 0)[rank].contiguous()


def save(run: Path, whole: Model, tp: int = 1, pp: int = 1, vpp: int = 1) -> Path:
    """Save as Megatron does: layers are numbered from 0 in every chunk."""
    folder = run / "wgrads" / "iter_0000002"
    folder.mkdir(parents=True)
    per_chunk = LAYERS // (pp * vpp)
    for rank in range(tp):
        for stage in range(pp):
            state: dict[str, Any] = {}
            for chunk in range(vpp):
                place, held = chunk * pp + stage, {}
                for name, tensor in whole.items():
                    piece = shard(name, tensor, rank, tp)
                    if not name.startswith("decoder.layers."):
                        first = name.startswith("embedding")
                        if place == (0 if first else pp * vpp - 1):
                            held[name] = piece
                        continue
                    _, _, number, rest = name.split(".", 3)
                    if int(number) // per_chunk == place:
                        held[f"decoder.layers.{int(number) % per_chunk}.{rest}"] = piece
                if place == pp * vpp - 1 and pp > 1:  # the last stage's copy of a tied embedding
                    tied = whole["embedding.word_embeddings.weight"]
                    held["output_layer.weight"] = shard("output_layer", tied, rank, tp)
                state[f"model_chunk{chunk}"] = held
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            torch.save(state, folder / f"{name}.pth")
    return run


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 1)])
def test_layouts_of_one_model_have_equal_gradients(
    tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    baseline = save(tmp_path / "stock", model())
    run = save(tmp_path / "magi", model(1e-3), *layout)
    assert saved_iterations(run) == [2]
    errors = gradient_errors(run, Baseline((baseline,)))
    assert {e.parameter for e in errors} == set(model())
    for error in errors:
        assert error.relative_error == pytest.approx(1e-3, rel=1e-2)
        whole = model()[error.parameter].norm().item()
        assert error.baseline_norm == pytest.approx(whole, rel=1e-6)


def test_equal_layouts_are_compared_rank_by_rank(tmp_path: Path) -> None:
    """Also a parameter of which nothing says how it is split."""
    for name, value in (("stock", 1.0), ("magi", 1.5)):
        folder = tmp_path / name / "checkpoints" / "wgrads" / "iter_0000001"
        folder.mkdir(parents=True)
        for rank in range(2):
            state = {"model_chunk0": {"mixer.in": torch.full((3, 2), value, dtype=torch.bfloat16)}}
            torch.save(state, folder / f"mp_rank_{rank:02d}.pth")
    (error,) = gradient_errors(tmp_path / "magi", Baseline((tmp_path / "stock",)))
    assert (error.relative_error, error.baseline_norm) == (0.5, pytest.approx(12**0.5))
    (tmp_path / "magi/checkpoints/wgrads/iter_0000001/mp_rank_01.pth").unlink()
    with pytest.raises(RunError, match=r"got mixer\.in; save both with one --tensor-model"):
        gradient_errors(tmp_path / "magi", Baseline((tmp_path / "stock",)))


def test_experts_get_their_numbers_in_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "wgrads" / "iter_0000001"
    folder.mkdir(parents=True)
    experts = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    for rank in range(2):
        held = {f"{experts}{i}": torch.full((2, 2), 2.0 * rank + i) for i in range(2)}
        held["decoder.layers.0.mlp.router.weight"] = torch.ones(4, 2)
        torch.save({"model_chunk0": held}, folder / f"mp_rank_00_{rank:03d}.pth")
    found = read_wgrads(tmp_path, 1)
    assert [found[f"{experts}{i}"][0][0, 0] for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert len(found["decoder.layers.0.mlp.router.weight"]) == 1


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    run = save(tmp_path / "run", model(), tp=2, pp=2)
    path = run / "wgrads" / "iter_0000002" / "mp_rank_01_001.pth"
    path.write_bytes(b"short")
    with pytest.raises(RunError, match=r"must be readable, got .*mp_rank_01_001\.pth; save them"):
        read_wgrads(run, 2)
    path.unlink()
    with pytest.raises(RunError, match="must have a file for every tensor, pipeline and expert"):
        read_wgrads(run, 2)


def test_a_lost_key_is_found_in_one_parameter(tmp_path: Path) -> None:
    wrong = model()
    wrong["decoder.layers.3.mlp.linear_fc2.weight"] *= 1.5
    errors = gradient_errors(
        save(tmp_path / "wrong", wrong, 2, 2), Baseline((save(tmp_path / "stock", model()),))
    )
    found = {e.parameter: e.relative_error for e in errors if e.relative_error}
    assert found == {"decoder.layers.3.mlp.linear_fc2.weight": pytest.approx(0.5)}
    assert np.isfinite([e.norm for e in errors]).all()
