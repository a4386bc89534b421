"""Two context-parallel processes train what one trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_magi import PrefixTree
from megatron_magi.huggingface import Packing, dispatch_batch
from tests.huggingface.cp_jobs import heads_of_plans, sharded, spread, whole
from tests.huggingface.tiny_models import VOCAB, build, config, tokens
from tests.process_pool import pool

pytest.importorskip("transformers")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(
    "name, kind",
    [("llama", "packed"), ("qwen3", "sums"), ("gemma2", "packed"), ("gemma3", "padded"),
     ("gpt_oss", "packed"), ("gpt_oss", "padded")],
)  # fmt: skip
def test_two_processes_have_loss_logits_and_gradients_of_one(name: str, kind: str) -> None:
    loss, logits, grads = whole(name, kind)
    for shared_loss, shared_logits, shared in pool(2).run(spread, name, kind):
        assert shared_loss == pytest.approx(loss, rel=1e-5)
        is_token = torch.ones(len(logits), dtype=torch.bool)
        if kind == "padded":
            is_token[15:21] = False
        torch.testing.assert_close(shared_logits[is_token], logits[is_token], **CLOSE)
        for mine, other in zip(shared, grads, strict=True):
            torch.testing.assert_close(mine, other, **CLOSE)


def test_fsdp_in_mixed_precision_keeps_the_batch() -> None:
    """It rebuilds every dataclass among the inputs of a layer."""
    loss, _, grads = whole("gemma3", "packed")
    for shared_loss, shared, num_plans in pool(2).run(sharded, "gemma3", "packed"):
        assert (shared_loss, num_plans) == (pytest.approx(loss, rel=1e-5), 2)
        for mine, other in zip(shared, grads, strict=True):
            torch.testing.assert_close(mine, other, **CLOSE)


def test_layers_share_one_plan_for_each_window() -> None:
    assert pool(2).run(heads_of_plans) == [[(0, 4), (7, 4)]] * 2


def test_one_rank_needs_no_group() -> None:
    local = dispatch_batch(tokens(1, 9), None, config("llama"), None)
    assert torch.equal(local["input_ids"], tokens(1, 9)) and "labels" not in local
    assert local["position_ids"].tolist() == [list(range(9))]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["linear_attention"]}, "layer_types with linear_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type with mamba"),
    ],
)
def test_layers_that_mix_tokens_otherwise_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        dispatch_batch(tokens(1, 8), None, SimpleNamespace(**changes), None)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    """It takes any name of an implementation, and would see a rank's own rows alone."""
    import transformers

    made = transformers.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=61)
    with pytest.raises(NotImplementedError, match="got OpenAIGPTLMHeadModel, which has its own"):
        dispatch_batch(tokens(1, 8), None, made, None)


def test_a_configuration_of_several_parts_gives_that_of_its_text() -> None:
    whole = SimpleNamespace(get_text_config=lambda: config("llama"))
    assert dispatch_batch(tokens(1, 8), None, whole, None)["input_ids"].shape == (1, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_config": None}, "model_config must be a model's configuration.*got a NoneType"),
        ({"model_config": {"hidden_size": 32}}, "got a dict; pass model.config"),
        ({"packing": torch.arange(8)[None]}, "packing must be a Packing"),
        ({"packing": Packing([[0, 1]])}, r"packing\.position_ids must be a Tensor"),  # type: ignore[arg-type]
    ],
)
def test_other_kinds_of_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"model_config": config("llama"), **changes}
    with pytest.raises(TypeError, match=message):
        dispatch_batch(tokens(1, 8), None, cp_group=None, **given)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": tokens(8)}, r"input_ids must be \[sequences, tokens\]"),
        ({"labels": tokens(1, 7)}, "labels must have the shape of input_ids"),
        ({"packing": Packing(position_ids=tokens(1, 9))}, "position_ids must be"),
        (
            {"packing": Packing(tokens(3, 1, 8), cu_seqlens=torch.tensor([0, 8]))},
            r"packing\.position_ids must have the shape of input_ids",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(inputs: dict[str, Any], message: str) -> None:
    given = {"input_ids": tokens(1, 8), "labels": None, **inputs}
    with pytest.raises(ValueError, match=message):
        dispatch_batch(model_config=config("llama"), cp_group=None, **given)


def test_a_dispatched_batch_takes_no_other_documents() -> None:
    model = build(config("llama"), "magi")
    local = dispatch_batch(tokens(1, 8), None, model.config, None)
    sums = torch.tensor([0, 3, 8])
    with pytest.raises(TypeError, match="with it, got cu_seq_lens_q; call"):
        model(**local, cu_seq_lens_q=sums)
    keep = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(TypeError, match="got an attention_mask"):
        model(**local, attention_mask=keep)


def test_rows_of_a_dispatched_batch_need_it() -> None:
    model = build(config("llama"), "magi")
    first, other = (dispatch_batch(tokens(1, 8), None, model.config, None) for _ in range(2))
    without = {name: value for name, value in first.items() if name != "magi_batch"}
    with pytest.raises(ValueError, match="gave with them, got none; call"):
        model(**without)
    with pytest.raises(ValueError, match="got that of another batch"):
        model(**first | {"magi_batch": other["magi_batch"]})


TREE = PrefixTree((7, 5, 4, 6), (-1, 0, 0, 1))


def tree_logits(rank: int) -> tuple[torch.Tensor, list[int]]:
    """This rank's logits of the tree's rows, and which rows they are."""
    model = build(config("llama"), "magi")
    group = None if rank < 0 else dist.group.WORLD
    local = dispatch_batch(tokens(1, 22), None, model.config, group, Packing(tree=TREE))
    layout = local["magi_batch"].first.layout
    return model(**local).logits[0].detach(), layout.position_ids(max(0, rank)).tolist()


def test_a_tree_has_the_logits_of_its_branches() -> None:
    """On one rank and on two: each branch is a sequence of its own."""
    model = build(config("llama"), "eager")
    wanted = torch.zeros(22, VOCAB)
    for nodes in TREE.branches():
        rows = torch.from_numpy(TREE.rows_of(nodes))
        wanted[rows] = model(input_ids=tokens(1, 22)[:, rows]).logits[0].detach()
    for logits, rows in [tree_logits(-1), *pool(2).run(tree_logits)]:
        real = [i for i, row in enumerate(rows) if row < 22]
        torch.testing.assert_close(logits[real], wanted[[rows[i] for i in real]], **CLOSE)


def test_what_a_tree_stands_for_is_refused_with_it() -> None:
    packing, ids = Packing(tree=TREE, position_ids=tokens(1, 22)), tokens(1, 22)
    with pytest.raises(ValueError, match="got position_ids, labels with it; leave them out"):
        dispatch_batch(ids, ids, config("llama"), None, packing)
    with pytest.raises(ValueError, match=r"the tree's rows, \[1, 22\], got \[1, 9\]"):
        dispatch_batch(tokens(1, 9), None, config("llama"), None, Packing(tree=TREE))
    model = build(config("mistral"), "magi")
    with pytest.raises(NotImplementedError, match="a tree needs layers without a window, got one"):
        model(**dispatch_batch(ids, None, model.config, None, Packing(tree=TREE)))
