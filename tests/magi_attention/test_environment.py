"""Variables of MagiAttention: whoever sets one is told once what happens instead."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from megatron_magi.magi_attention import renamed
from megatron_magi.magi_attention.renamed import INSTEAD

PROGRAM = """
import sys, warnings
warnings.simplefilter("always")
from megatron_magi import magi_attention as api
print("imported", file=sys.stderr)
import torch
q = torch.zeros(4, 1, 8)
api.flex_flash_attn_func(q, q, q)
"""
Q = torch.zeros(4, 1, 8)
CALLS = {
    "varlen key": lambda: api.magi_attn_varlen_key([0, 4], [0, 4], 1, 1, 8, 0, None),
    "flex": lambda: api.flex_flash_attn_func(Q, Q, Q),
    "mask": lambda: api.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4]),
    "window": lambda: api.infer_attn_mask_from_sliding_window((0, 4), (0, 4), (1, 0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_variables_give_one_warning_at_the_first_call(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renamed, "_told", False)
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    monkeypatch.setenv("MAGI_ATTENTION_NO_SUCH", "1")
    with pytest.warns(UserWarning) as said:
        CALLS[call]()
        CALLS[call]()
    (one,) = said
    text = str(one.message)
    assert "MAGI_ATTENTION_DETERMINISTIC_MODE (MagiConfig(deterministic=True) does it)" in text
    assert "MAGI_ATTENTION_NO_SUCH (no effect)" in text
    assert "reads no MAGI_ATTENTION_* variable but QO_COMM, got" in text and "; unset them" in text
    assert one.filename == __file__, "the warning points at the caller"


def test_importing_says_nothing() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "MAGI_ATTENTION_NO_SUCH": "1"},
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    before, after = said.split("imported")
    assert "Warning" not in before and after.count("Warning") == 1, said


def test_qo_comm_alone_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_told", False)
    for name in [name for name in os.environ if name.startswith("MAGI_ATTENTION_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS["flex"]()


def test_qo_comm_lets_plans_send_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [MagiConfig(send_queries=False), MagiConfig()]
    for value, got in (("1", [False, True]), ("0", [False, None])):
        monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", value)
        configs = [api.DistAttnConfig(magi_config=config).engine_config() for config in asked]
        assert [config.send_queries for config in configs] == got


@pytest.mark.parametrize("value", ["true", "", "2"])
def test_qo_comm_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", value)
    with pytest.raises(ValueError, match=f"QO_COMM must be '0' or '1', got {value!r}; use one"):
        api.DistAttnConfig().engine_config()


def test_what_happens_instead_names_what_exists() -> None:
    for text in INSTEAD.values():
        for part in text.split("MagiConfig(")[1:]:
            assert hasattr(MagiConfig(), part.split("=")[0])
