"""Plans of a microbatch's documents, for layers with and without a window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_magi import MagiConfig, masks
from megatron_magi.adapter.model_shape import head_shape
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.core.runtime.plan_cache import plan_for
from tests.adapter.test_packed import BOUNDS, first_of_two_ranks, model


def test_experts_need_a_stream_without_padding() -> None:
    """Their router would count padding rows."""
    by_hundreds = {"magi_config": MagiConfig(chunk_size=100), "device": "cpu"}
    experts = model(num_moe_experts=4)
    make_packed_seq_params([0, 120, 300], experts, None, **by_hundreds)
    with pytest.raises(NotImplementedError, match="got 250 tokens, which 1 ranks hold as 300"):
        make_packed_seq_params([0, 120, 250], experts, None, **by_hundreds)
    make_packed_seq_params([0, 120, 250], model(), None, **by_hundreds)


def test_full_documents() -> None:
    packed = make_packed_seq_params(BOUNDS, model(), None, mask="full", device="cpu")
    assert packed.token_plan.mask == masks.from_cu_seqlens(BOUNDS, causal=False)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mask": "Causal"}, ValueError, "'causal' or 'full'"),
        ({"mask": None}, TypeError, "AttnMask or str"),
    ],
)
def test_a_wrong_mask_is_refused(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_packed_seq_params(BOUNDS, model(), None, device="cpu", **options)


def test_window_layers_get_their_own_plan_on_the_same_dispatch() -> None:
    config = model(window_size=(3, 0), window_attn_skip_freq=2)
    packed = make_packed_seq_params(BOUNDS, config, None, device="cpu")
    assert packed.plan.mask == masks.from_cu_seqlens(BOUNDS)
    assert packed.window_plan.mask == masks.from_cu_seqlens(BOUNDS, window_size=(3, 0))
    assert packed.window_plan.layout == packed.plan.layout
    chosen = [packed.plan_of_layer(config, number) is packed.window_plan for number in (1, 2, 3, 4)]
    assert chosen == [True, False, True, False]


def test_windows_in_all_layers_need_one_plan() -> None:
    config = model(window_size=(3, 0))
    packed = make_packed_seq_params(BOUNDS, config, None, device="cpu")
    assert packed.plan is None
    assert packed.plan_of_layer(config, 1) is packed.window_plan is packed.token_plan


def test_own_mask() -> None:
    mask = masks.block_causal([[4, 4], [8]])
    packed = make_packed_seq_params([0, 8, 16], model(), None, mask=mask, device="cpu")
    assert packed.token_plan.mask == mask


def test_own_mask_must_fit_the_stream_and_the_model() -> None:
    with pytest.raises(ValueError, match=r"one stream, got a mask of 8 x 8 and 16 tokens"):
        make_packed_seq_params(BOUNDS, model(), None, mask=masks.causal(8))
    both = (masks.causal(16), masks.causal(16))
    with pytest.raises(ValueError, match=r"must be two, .* got 2 masks and no window_size"):
        make_packed_seq_params(BOUNDS, model(), None, mask=both)
    wrong: Any = (*both, both[0])
    with pytest.raises(ValueError, match=r"must be two, .* got 3 masks and a window_size"):
        make_packed_seq_params(BOUNDS, model(window_size=(3, 0)), None, mask=wrong)
    wrong = ("causal", both[0])
    with pytest.raises(TypeError, match="mask must be an AttnMask, got 'causal'"):
        make_packed_seq_params(BOUNDS, model(window_size=(3, 0)), None, mask=wrong)


def test_a_window_narrows_an_own_mask_in_window_layers() -> None:
    mask = masks.block_causal([[4, 4], [8]])
    config = model(window_size=(2, 1), window_attn_skip_freq=2)
    packed = make_packed_seq_params([0, 8, 16], config, None, mask=mask, device="cpu")
    distance = np.subtract.outer(np.arange(16), np.arange(16))  # query - key
    seen = mask.to_dense() & (distance <= 2) & (distance >= -1)
    assert packed.plan.mask == mask
    assert (packed.window_plan.mask.to_dense() == seen).all()


def test_window_layers_may_have_a_mask_of_their_own() -> None:
    """Chunked attention: a window of a chunk's tokens leaves the chunks as they are."""
    both = masks.from_cu_seqlens(BOUNDS), masks.chunked(BOUNDS, 4)
    config = model(window_size=(3, 0), window_attn_skip_freq=4)
    packed = make_packed_seq_params(BOUNDS, config, None, mask=both, device="cpu")
    assert (packed.plan.mask, packed.window_plan.mask) == both


def test_a_window_plan_takes_over_a_layout_that_it_would_not_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are dispatched once, for all layers, and balanced for the layers that see more."""
    bounds = [0, 300, 2000, 4096]
    first_of_two_ranks(monkeypatch)
    config = model(window_size=(30, 0), window_attn_skip_freq=2)
    packed = make_packed_seq_params(bounds, config, None, device="cpu")
    alone = plan_for(packed.window_plan.mask, 2, head_shape(config))
    assert alone.layout != packed.plan.layout, "else this shows nothing"
    assert packed.window_plan.layout == packed.plan.layout
