"""TransformerEngine as a rival of the distributed benchmark, with a stand-in for it on gloo."""

from __future__ import annotations

import importlib.util
import os

import pytest

from benchmarks.distributed import attn as bench
from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.cli.parser import UsageError
from tests.benchmarks.distributed.engine_jobs import compare
from tests.process_pool import pool

HEADS = HeadShape(4, 2, 8)
TOTAL = 192
EDGES = [0, 1, 3, 40, 45, 48, 112, TOTAL]
MASKS = {
    "full": masks.full(TOTAL),
    "causal": masks.causal(TOTAL),
    "window": masks.sliding_window(TOTAL, (20, 0)),
    "documents": masks.from_cu_seqlens(EDGES),
    "windows": masks.from_cu_seqlens(EDGES, window_size=(20, 0)),
    "full_documents": masks.from_cu_seqlens([0, 40, 112, TOTAL], causal=False),
    "tail": masks.causal(TOTAL - 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_it_gives_what_ours_does(name: str) -> None:
    padded = MASKS[name].total_seqlen_q % 4 != 0 or name in ("documents", "windows")
    for made in pool(2).run(compare, "te_fa3_all_gather", MASKS[name], HEADS):
        assert made["off"] < 1e-12 and (made["padding"] > 0) == padded


@pytest.mark.parametrize(
    ("method", "mask", "why"),
    [
        ("te_cudnn_p2p", MASKS["window"], "TransformerEngine: p2p takes no window"),
        ("te_cudnn_a2a", masks.from_cu_seqlens(EDGES, causal=False), "these documents need padd"),
        (
            "te_cudnn_a2a",
            masks.prefix_lm([0, TOTAL], [7]),
            "TransformerEngine takes packed documents",
        ),
    ],
)
def test_what_it_cannot_run_is_left_out_with_the_reason(
    method: str, mask: AttnMask, why: str
) -> None:
    assert all(x["reason"].startswith(why) for x in pool(2).run(compare, method, mask, HEADS))


def test_one_kernel_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.distributed import te

    with pytest.raises(UsageError, match="one kernel, cudnn or fa3, got both"):
        bench.options(["--impls", "ours,te_cudnn_p2p,te_fa3_a2a"])
    variables = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2", "NVTE_UNFUSED_ATTN")
    for variable in variables:
        monkeypatch.setenv(variable, "?")  # and back at the end
    te.choose_kernel(["ours", "te_fa3_a2a"])
    assert [os.environ[name] for name in variables] == ["0", "1", "0", "0"]


def test_without_the_package_its_columns_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert bench.importable(["ours", "te_fa3_a2a"]) == ["ours"]
    with pytest.raises(UsageError, match="no implementation"):
        bench.importable(["te_fa3_a2a"])
