"""The largest logits that QK-clip and its log read, on one process; who cannot find them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_magi.adapter.max_logit import check_max_logits, record_max_logits, wants_max_logits
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.config import MagiConfig
from tests.adapter.one_core import BOUNDS, HEADS, ROWS, attention, qkv, scores, visible


@pytest.mark.parametrize("setting", ["qk_clip", "log_max_attention_logit"])
def test_largest_logits_of_a_step(setting: str) -> None:
    core = attention()
    setattr(core.config, setting, True)
    packed = make_packed_seq_params(BOUNDS, core.config, None, device="cpu")
    wanted = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for scale in (1.0, 2.0, 0.5):
        q, k, v = (x.detach() * scale for x in qkv())
        core(q, k, v, None, packed_seq_params=packed)
        wanted = torch.maximum(wanted, scores(q, k, visible()).amax((0, 2, 3)))
        torch.testing.assert_close(core.current_max_attn_logits, wanted, rtol=1e-12, atol=0)
    # Hidden scores are larger: the mask matters.
    assert (
        scores(q * 4, k * 4, torch.ones(ROWS, ROWS, dtype=torch.bool)).amax((0, 2, 3)) > wanted
    ).any()


def test_no_logits_are_kept_unasked() -> None:
    core = attention()
    core(*qkv())
    assert core.current_max_attn_logits is None


@pytest.mark.parametrize("setting", ["qk_clip", "log_max_attention_logit"])
def test_flex_keeps_no_logits(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that a GPU would run is chosen by name; no GPU is needed to refuse it."""
    config = dataclasses.replace(attention().config, **{setting: True})
    device = torch.device("cuda")
    for family in ("is_hopper", "is_blackwell"):
        monkeypatch.setattr(f"megatron_magi.core.kernel.select.{family}", lambda _: False)
    with pytest.raises(NotImplementedError) as error:
        check_max_logits(config, MagiConfig(), torch.bfloat16, device)
    message = str(error.value)
    assert message.startswith(f"{setting} requires a kernel that finds the largest logits")
    assert "got 'flex' (kernel_backend='auto', torch.bfloat16 on cuda)" in message
    assert message.endswith(f"set {setting}=False, or kernel_backend='reference', which is slow")
    monkeypatch.setattr(
        "megatron_magi.adapter.max_logit.select_backend",
        lambda *_: SimpleNamespace(finds_max_logits=True),
    )
    check_max_logits(config, MagiConfig(), torch.bfloat16, device)
    monkeypatch.undo()
    check_max_logits(config, MagiConfig(kernel_backend="reference"), torch.bfloat16, device)
    check_max_logits(config, MagiConfig(), torch.float32, device)
    for family in ("is_hopper", "is_blackwell"):
        monkeypatch.setattr(f"megatron_magi.core.kernel.select.{family}", lambda _: False)
    check_max_logits(attention().config, MagiConfig(), torch.bfloat16, device)


def test_clipping_is_refused_beside_tensor_parallelism() -> None:
    """Megatron's clip_qk views a slice of the weights by the whole model's sizes."""
    config = dataclasses.replace(attention().config, tensor_model_parallel_size=2)
    config.log_max_attention_logit = True
    check_max_logits(config, MagiConfig(), torch.float32, torch.device("cpu"))
    config.qk_clip = True
    with pytest.raises(NotImplementedError, match="requires tensor_model_parallel_size=1, got 2"):
        check_max_logits(config, MagiConfig(), torch.float32, torch.device("cpu"))


def test_microbatches_raise_what_is_there() -> None:
    core = SimpleNamespace(current_max_attn_logits=None)
    for found, wanted in (([1.0, -2.0], [1.0, -2.0]), ([0.5, 3.0], [1.0, 3.0])):
        record_max_logits(core, torch.tensor(found))
        assert core.current_max_attn_logits.tolist() == wanted


@pytest.mark.parametrize("setting", [None, "qk_clip", "log_max_attention_logit"])
def test_who_wants_them(setting: str | None) -> None:
    config = SimpleNamespace(**({} if setting is None else {setting: True}))
    assert wants_max_logits(config) is (setting is not None)  # type: ignore[arg-type]
