"""A step's time by what runs, read from a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train.step_profile import kind_of, read_profile


def event(name: str, begin_ms: float, end_ms: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": 1e3 * begin_ms,
            "dur": 1e3 * (end_ms - begin_ms)}  # fmt: skip


def trace(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "rank-0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, file)
    return path


STEP = event("ProfilerStep#6", 100, 150, "user_annotation")
ON_THE_GPU = event("ProfilerStep#6", 101, 150, "gpu_user_annotation")


def test_parts_add_up_to_the_step_and_what_is_hidden_is_not_counted(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        STEP,
        ON_THE_GPU,
        event("nvjet_tst_128x256", 90, 110),
        event("void magi::fwd_kernel<Traits>(Args)", 108, 120),
        event("Memcpy PtoP (Device -> Device)", 112, 130, "gpu_memcpy"),
        event("ncclDevKernel_AllReduce", 115, 131),
        event("void at::native::vectorized_elementwise_kernel<4>()", 129, 135),
        event("aten::mm", 100, 150, "cpu_op"),
    )
    profile = read_profile(path)
    assert profile["step_ms"] == 50
    assert profile["parts_ms"] == {
        "attention": 12, "gemm": 8, "elementwise": 6, "exchange": 9, "idle": 15,
    }  # fmt: skip
    assert profile["busy_ms"] == {"attention": 12, "gemm": 10, "elementwise": 6, "exchange": 19}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void magi::bwd_kernel<BwdTraits<64>>(BwdArgs)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<", "attention"),
        ("void magi::gather_rows_kernel<8>(RowsArgs)", "exchange"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "gemm"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<", "elementwise"),
    ],
)
def test_a_name_says_the_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_without_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one step, got 0 in rank-0\.json\.gz"):
        read_profile(trace(tmp_path, event("nvjet", 0, 1)))
    with pytest.raises(ValueError, match="got 2"):
        read_profile(trace(tmp_path, STEP, STEP))
