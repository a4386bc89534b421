"""Weights by global name: equal in every layout, and every rank keeps its own slice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_magi.adapter  # noqa: F401  prepares megatron before it is imported

# isort: split
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from examples.init_by_name import init_by_name, named_global_parameters, sliced_dim

CONFIG = SimpleNamespace(
    init_method_std=0.02, num_layers=8, gated_linear_unit=True,
    num_moe_experts=8, expert_model_parallel_size=4,
)  # fmt: skip


class Place(SimpleNamespace):
    """Ranks and sizes of tensor parallelism, of the experts' own and of expert parallelism."""

    tp: tuple[int, int] = (0, 1)
    expert_tp: tuple[int, int] = (0, 1)
    expert: int = 0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place()
    for name, answer in {
        "tensor_model_parallel_rank": lambda: made.tp[0],
        "tensor_model_parallel_world_size": lambda: made.tp[1],
        "expert_tensor_parallel_rank": lambda: made.expert_tp[0],
        "expert_tensor_parallel_world_size": lambda: made.expert_tp[1],
        "expert_model_parallel_rank": lambda: made.expert,
    }.items():
        monkeypatch.setattr(parallel_state, f"get_{name}", answer)
    return made


def model(weights: dict[str, Tensor], first_layer: int = 1) -> Any:
    """A model chunk with these parameters; each module on their way knows the config."""
    chunk = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(chunk)
    for name, weight in weights.items():
        owner, *path = chunk, *name.split(".")
        for part in path[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
            owner.config = CONFIG
            if part.isdigit():
                owner.layer_number = first_layer + int(part)
        is_parameter = isinstance(weight, torch.nn.Parameter)
        owner.register_parameter(path[-1], weight if is_parameter else torch.nn.Parameter(weight))
    chunk.config = CONFIG
    return chunk


def sliced(*shape: int, dim: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape))
    made.tensor_model_parallel, made.partition_dim = True, dim
    return made


def names(*parameters: str, first_layer: int = 1) -> list[str]:
    made = model({name: torch.zeros(1) for name in parameters}, first_layer)
    return [name for name, _ in named_global_parameters(made)]


def test_layers_are_counted_over_pipeline_stages(place: Place) -> None:
    assert names("embedding.word_embeddings.weight", "decoder.final_layernorm.weight") == [
        "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]  # fmt: skip
    local = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(6)]
    assert names(*local[:2]) == local[:2]
    assert names(*local[:2], first_layer=5) == local[4:]


def test_a_shared_weight_has_the_embeddings_name(place: Place) -> None:
    """On the last stage it is the output layer's."""
    shared = torch.nn.Parameter(torch.zeros(1))
    shared.shared_embedding = True  # type: ignore[attr-defined]
    ((name, weight),) = named_global_parameters(model({"output_layer.weight": shared}))
    assert name == "embedding.word_embeddings.weight" and weight is shared


@pytest.mark.parametrize(
    "local", ["local_experts.1.linear_fc1.weight", "linear_fc1.weight1"], ids=["single", "grouped"]
)
def test_experts_are_counted_over_ranks(local: str, place: Place) -> None:
    """By one name, whether each is a module or they share one of TransformerEngine's."""
    place.expert = 2
    (name,) = names(f"decoder.layers.0.mlp.experts.{local}")
    assert name == "decoder.layers.0.mlp.experts.experts.5.linear_fc1.weight"


@pytest.mark.parametrize("local", ["weight1", "weight2", "linear_fc1.weight"])
def test_a_weight_of_several_experts_is_refused(local: str, place: Place) -> None:
    """weight1 and weight2 are Megatron's, which hold all experts of a rank."""
    with pytest.raises(NotImplementedError, match=rf"one parameter an expert, got .*{local};"):
        names(f"decoder.layers.0.mlp.experts.{local}")


WEIGHTS = {
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 8, 0),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 12, 1),
    "decoder.layers.0.mlp.linear_fc1.weight": (24, 8, 0),
    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": (24, 8, 0),
}
"""Two dimensions, and the one that tensor parallelism slices."""


def drawn(ranks: int = 1, rank: int = 0, seed: int = 3, default: str = "cpu") -> dict[str, Tensor]:
    """A rank's weights of a model that is sliced into so many."""
    weights = {}
    for name, (rows, columns, dim) in WEIGHTS.items():
        shape = [rows, columns]
        shape[dim] //= ranks
        weights[name] = sliced(*shape, dim=dim)
    made = model(dict(weights))
    with torch.device(default):
        init_by_name([made], seed)
    return {name: weight.detach() for name, weight in made.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_all_ranks_are_the_whole_weight(ranks: int, place: Place) -> None:
    """Gate and up are sliced each by itself; experts by the tensor parallelism of their own."""
    whole, parts = drawn(), []
    for rank in range(ranks):
        place.tp = place.expert_tp = (rank, ranks)
        parts.append(drawn(ranks, rank))
    for name, (_, _, dim) in WEIGHTS.items():
        slices = [part[name] for part in parts]
        if "linear_fc1" in name:
            halves = zip(*(x.chunk(2, dim) for x in slices), strict=True)
            slices = [x for half in halves for x in half]
        assert torch.equal(torch.cat(slices, dim), whole[name]), name


def test_experts_may_be_sliced_otherwise(place: Place) -> None:
    place.tp, place.expert_tp = (1, 2), (0, 1)
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    made = model({name: sliced(24, 8, dim=0)})
    init_by_name(made, 3)
    place.tp = (0, 1)
    assert torch.equal(next(made.parameters()), drawn()[name])


def test_a_weight_depends_on_seed_and_name_alone(place: Place) -> None:
    first, other = drawn(seed=3), drawn(seed=4)
    torch.manual_seed(0)
    again = drawn(seed=3, default="meta")  # the weights themselves are on the CPU
    for name, weight in first.items():
        assert torch.equal(weight, again[name]) and not torch.equal(weight, other[name])
    fc1 = [weight for name, weight in first.items() if "linear_fc1" in name]
    assert not torch.equal(*fc1)


@pytest.mark.parametrize("std", [None, 0.5])
def test_residual_projections_shrink_with_depth(std: float | None, place: Place) -> None:
    shape, layer = (256, 256), "decoder.layers.0."
    made = model({
        f"{layer}self_attention.linear_qkv.weight": torch.zeros(shape),
        f"{layer}self_attention.linear_proj.weight": torch.zeros(shape),
        f"{layer}mlp.linear_fc2.weight": torch.zeros(shape),
        f"{layer}mlp.linear_fc2.bias": torch.ones(8),
        f"{layer}input_layernorm.weight": torch.zeros(8),
        f"{layer}input_layernorm.bias": torch.ones(8),
    })  # fmt: skip
    init_by_name(made, std=std)
    qkv, proj, fc2, bias, norm, norm_bias = (x.detach() for x in made.parameters())
    want = std or 0.02
    assert float(qkv.std()) == pytest.approx(want, rel=0.02)
    for weight in (proj, fc2):
        assert float(weight.std()) == pytest.approx(want / math.sqrt(2 * 8), rel=0.02)
    assert not bias.any() and not norm_bias.any() and (norm == 1).all()


def test_what_every_rank_has_is_not_sliced(place: Place) -> None:
    place.tp = (1, 2)
    name = "decoder.layers.0.mlp.router.weight"
    weights = []
    for rank in range(2):
        place.tp = (rank, 2)
        made = model({name: torch.zeros(4, 8)})
        init_by_name(made)
        weights.append(next(made.parameters()))
    assert torch.equal(*weights) and sliced_dim(weights[0]) == -1
    assert sliced_dim(sliced(4, 8, dim=1)) == 1
