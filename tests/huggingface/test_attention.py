"""Models of Transformers on our attention against their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_magi import MagiConfig
from tests.huggingface.tiny_models import (
    SHAPE,
    VOCAB,
    WINDOW,
    build,
    config,
    gradients,
    loss_step,
    positions,
    tokens,
)

pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen3", "mistral", "gpt_oss", "gemma2", "gemma3"]
WITHOUT_SDPA = ("gpt_oss", "gemma2")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def stock(name: str) -> Any:
    return build(config(name), "eager" if name in WITHOUT_SDPA else "sdpa")


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE)
    assert len(ours[1]) == len(theirs[1]) > 0
    for mine, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_stock_attention(name: str) -> None:
    ids = tokens(2, 23)
    ours = loss_step(build(config(name), "magi"), input_ids=ids)
    assert_same(ours, loss_step(stock(name), input_ids=ids))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_packed_row_is_its_documents(name: str, use_cache: bool) -> None:
    lengths = (9, 1, 14)
    ids = tokens(1, sum(lengths))
    model = build(config(name), "magi")
    packed = model(input_ids=ids, position_ids=positions(*lengths), use_cache=use_cache).logits
    for document, rows in zip(ids.split(lengths, 1), packed.split(lengths, 1), strict=True):
        torch.testing.assert_close(rows, stock(name)(input_ids=document).logits, **CLOSE)


def test_prefix_sums_name_documents_as_positions_do() -> None:
    ids, sums = tokens(1, 20), torch.tensor([0, 6, 20], dtype=torch.int32)
    model = build(config("qwen3"), "magi")
    by_position = model(input_ids=ids, position_ids=positions(6, 14)).logits
    by_sums = model(
        input_ids=ids, position_ids=positions(6, 14), cu_seq_lens_q=sums, cu_seq_lens_k=sums,
        max_length_q=14, max_length_k=14,
    ).logits  # fmt: skip
    assert torch.equal(by_position, by_sums)
    alone = model(input_ids=ids, cu_seq_lens_q=sums).logits  # rotary embeddings see distances only
    torch.testing.assert_close(alone, by_position, **CLOSE)


def test_packed_rows_of_a_batch_are_separate() -> None:
    ids, pos = tokens(2, 12), torch.cat([positions(5, 7), positions(12)])
    model = build(config("llama"), "magi")
    both = model(input_ids=ids, position_ids=pos).logits
    torch.testing.assert_close(both[:1, 5:], model(input_ids=ids[:1, 5:]).logits, **CLOSE)
    torch.testing.assert_close(both[1:], model(input_ids=ids[1:]).logits, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3"])
def test_padding_at_both_ends(name: str) -> None:
    ids = tokens(3, 12)
    keep = torch.ones_like(ids)
    keep[0, :4] = 0
    keep[1, 9:] = 0
    results = []
    for model in (build(config(name), "magi"), stock(name)):
        logits = model(input_ids=ids, attention_mask=keep).logits[keep.bool()]
        logits.square().mean().backward()
        results.append((logits.detach(), gradients(model)))
    assert_same(*results)


def test_recomputed_layers_have_the_same_gradients() -> None:
    inputs = {"input_ids": tokens(1, 20), "position_ids": positions(8, 12)}
    plain, again = (build(config("gemma3"), "magi") for _ in range(2))
    again.gradient_checkpointing_enable()
    assert_same(loss_step(again, **inputs), loss_step(plain, **inputs))


def test_one_mask_is_made_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_magi.huggingface import mask_request

    calls = []
    found = mask_request.find_documents
    monkeypatch.setattr(mask_request, "find_documents", lambda *a: calls.append(1) or found(*a))
    made = config("gemma3", num_hidden_layers=6, layer_types=["sliding_attention"] * 5
                  + ["full_attention"])  # fmt: skip
    build(made, "magi")(input_ids=tokens(1, 20), position_ids=positions(8, 12))
    assert len(calls) == 2


def test_the_engine_may_be_chosen() -> None:
    from megatron_magi.huggingface import register

    model = build(config("llama"), "magi")
    register(MagiConfig(kernel_backend="cuda"))
    with pytest.raises(NotImplementedError, match="cuda"):
        model(input_ids=tokens(1, 8))
    register()


def test_autocast_gives_its_dtype() -> None:
    ids = tokens(1, 16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = build(config("qwen3"), "magi")(input_ids=ids).logits
        theirs = stock("qwen3")(input_ids=ids).logits
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)


REFUSED = [
    ({"attention_dropout": 0.1}, {}, "attention_dropout=0.0"),
    ({}, {"output_attentions": True}, "attn_implementation='eager'"),
    ({}, {"attention_mask": torch.ones(1, 1, 10, 10)}, r"got a Tensor \[1, 1, 10, 10\]"),
    ({}, {"position_bias": torch.zeros(1)}, "got position_bias"),
    ({}, {"is_causal": False}, "bidirectional_mask_function"),
    ({}, {"cu_seq_lens_q": torch.tensor([0, 4])}, r"from 0 to the 10 rows.*got \[0, 4\]"),
    ({}, {"cu_seq_lens_k": torch.tensor([0, 10])}, "cu_seq_lens_k must equal"),
    ({}, {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])}, "between tokens"),
    ({}, {"magi_batch": 1}, "got int"),
]


@pytest.mark.parametrize("changes, inputs, message", REFUSED, ids=[m[:20] for *_, m in REFUSED])
def test_what_cannot_be_honoured_is_refused(
    changes: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    model = build(config("llama", **changes), "magi")
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        model(input_ids=tokens(1, 10), **inputs)


def test_packed_rows_are_refused_beside_layers_that_take_no_notice_of_them() -> None:
    import transformers

    kinds = ["conv", "full_attention"]
    model = build(transformers.Lfm2Config(**{**SHAPE, "layer_types": kinds}), "magi").eval()
    whole = model(input_ids=tokens(2, 5)).logits
    assert whole.shape == (2, 5, VOCAB)
    with pytest.raises(NotImplementedError, match=r"packed rows need.*got layer_types with conv"):
        model(input_ids=tokens(1, 10), position_ids=positions(4, 6))


@pytest.mark.parametrize("name, sizes", [
    ("Bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 1}),
    ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}),
])  # fmt: skip
def test_models_that_read_their_mask_are_refused(name: str, sizes: dict[str, int]) -> None:
    import transformers

    made = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **sizes)
    with pytest.raises(NotImplementedError, match="a model that reads it as a tensor"):
        build(made, "magi")(input_ids=tokens(1, 10))


def test_dropout_is_no_matter_in_evaluation() -> None:
    build(config("llama", attention_dropout=0.1), "magi").eval()(input_ids=tokens(1, 10))


def test_decoding_from_a_cache_is_refused_after_the_prompt() -> None:
    model = build(config("llama"), "magi").eval()
    with pytest.raises(NotImplementedError, match=r"set_attn_implementation\('sdpa'\)"):
        model.generate(input_ids=tokens(1, 8), max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("sdpa")
    expected = model.generate(input_ids=tokens(1, 8), max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("magi")
    uncached = model.generate(
        input_ids=tokens(1, 8), max_new_tokens=3, do_sample=False, use_cache=False
    )
    assert torch.equal(uncached, expected)


def test_two_windows_for_one_layer_are_refused() -> None:
    model = build(config("gemma3"), "magi")
    model.model.layers[0].self_attn.sliding_window = WINDOW + 1
    with pytest.raises(ValueError, match="a window of 8 tokens and a mask with 7"):
        model(input_ids=tokens(1, 10))
