"""The mask function takes what documents and windows express, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from tests.huggingface.tiny_models import config, positions

transformers = pytest.importorskip("transformers")

from megatron_magi.huggingface import register  # noqa: E402
from megatron_magi.huggingface.mask_request import MaskRequest  # noqa: E402


def asked(kind: str = "causal", **arguments: Any) -> MaskRequest:
    """What Transformers returns to a model for a kind of mask."""
    from transformers import masking_utils

    register()
    made = config("gemma3", **arguments.pop("changes", {}))
    made._attn_implementation = "magi"
    made.attention_chunk_size = 4
    inputs = {"inputs_embeds": torch.zeros(1, 12, 32), "attention_mask": None, "cache": None}
    make = getattr(masking_utils, f"create_{kind}_mask")
    return make(config=made, **{**inputs, **arguments})


def test_windows_and_documents_are_kept() -> None:
    plain = asked()
    assert (plain.batch_shape, plain.window, plain.is_packed) == ((1, 12), None, False)
    window = asked("sliding_window_causal", position_ids=positions(5, 7))
    assert (window.window, window.is_packed) == (7, True)
    dense = window.mask(positions(5, 7), None).to_dense()
    assert dense.sum() == sum(min(i + 1, 7) for n in (5, 7) for i in range(n))


def test_fsdp_in_mixed_precision_gives_every_layer_the_same_request() -> None:
    request = asked()
    assert _apply_to_tensors(torch.Tensor.double, [request])[0] is request


def test_the_mask_is_made_once_for_the_same_tensors() -> None:
    request, where = asked(), positions(5, 7)
    assert request.mask(where, None) is request.mask(where, None)
    assert request.mask(where.clone(), None) == request.mask(where, None)


@pytest.mark.parametrize(
    "kind, arguments, name",
    [
        ("chunked_causal", {}, "chunked_overlay"),
        ("bidirectional", {}, "bidirectional_mask_function"),
        ("bidirectional_sliding_window", {}, "sliding_window_bidirectional_overlay"),
        ("causal", {"block_sequence_ids": torch.zeros(1, 12, dtype=torch.long)}, "blockwise"),
        ("causal", {"or_mask_function": lambda *_: torch.tensor(True)}, "or_masks"),
        ("causal", {"and_mask_function": lambda *_: torch.tensor(True)}, "lambda"),
    ],
)
def test_other_masks_are_refused_by_name(kind: str, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        asked(kind, **arguments)


def test_packed_rows_need_their_positions() -> None:
    with pytest.raises(ValueError, match="does not pass them on"):
        asked(position_ids=positions(5, 7)).mask(None, None)
