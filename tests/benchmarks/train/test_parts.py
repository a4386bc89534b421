"""Implementations of the parts beside attention compute the same, on the CPU as far as they can."""

from __future__ import annotations

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

from benchmarks.train import parts
from benchmarks.train.part_cases import PARTS, Sizes
from megatron_magi.cli.parser import UsageError

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

SMALL = Sizes(tokens=24, heads=4, groups=2, head_dim=8, vocab=97, layers=3)


@pytest.mark.parametrize(
    ("part", "impl"), [(part, impl) for part, makes in parts.ALL.items() for impl in makes]
)
def test_implementations_agree_with_fp32(part: str, impl: str) -> None:
    if impl.startswith("te"):
        pytest.importorskip("transformer_engine.pytorch", exc_type=Exception)
    if impl.startswith("liger"):
        pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    inputs = PARTS[part].inputs(SMALL, DEVICE)
    exact = PARTS[part].exact(SMALL, inputs)
    call, off = parts.tried(parts.ALL[part][impl], SMALL, inputs, exact)
    assert parts.agreement(off)["agrees"], off
    assert [x.shape for x in call()] == [x.shape for x in exact]


def test_another_result_is_noticed() -> None:
    inputs = PARTS["qkv_rope"].inputs(SMALL, DEVICE)
    exact = PARTS["qkv_rope"].exact(SMALL, inputs)
    swapped = {**inputs, "mixed": inputs["mixed"].roll(SMALL.head_dim, -1)}
    _, off = parts.tried(parts.ALL["qkv_rope"]["ours"], SMALL, swapped, exact)
    assert not parts.agreement(off)["agrees"]


def row(part: str, impl: str, ms: float, agrees: bool = True) -> dict[str, object]:
    calls = PARTS[part].calls(SMALL) * 2
    return {"part": part, "impl": impl, **parts.figures([ms] * 3, calls), "agrees": agrees}


def test_the_best_other_that_agrees_is_beside_ours() -> None:
    rows = [row("qkv_rope", "ours", 1.0), row("qkv_rope", "megatron", 2.0)]
    rows += [row("qkv_rope", "te", 1.5), row("qkv_rope", "liger", 0.5, agrees=False)]
    rows += [row("cross_entropy", "ours", 1.0)]
    assert list(parts.compared(rows, 100)) == [
        "qkv_rope: ours 6.0 ms (6.00 %), te 9.0 ms (9.00 %), difference 3.0 ms (3.00 %)",
        "cross_entropy: nothing to compare, as only ours can be used",
    ]


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="a CUDA GPU is needed to time the parts, got none"):
        parts.main([])
