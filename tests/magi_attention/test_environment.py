"""Variables of MagiAttention: whoever sets one is told once what happens instead."""

import os
import subprocess
import sys

import pytest

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from megatron_magi.magi_attention import renamed
from megatron_magi.magi_attention.renamed import INSTEAD

PROGRAM = """
import sys, warnings
warnings.simplefilter("always")
from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
print("imported", file=sys.stderr)
import torch
q = torch.zeros(4, 1, 8)
for _ in range(2):
    {call}
"""
CALLS = {
    "varlen key": "api.magi_attn_varlen_key([0, 4], [0, 4], 1, 1, 8, 0, None)",
    "flex": "api.flex_flash_attn_func(q, q, q)",
    "mask": "api.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4])",
    "window": "api.infer_attn_mask_from_sliding_window((0, 4), (0, 4), (1, 0))",
}


def run(call: str, variables: dict[str, str]) -> str:
    """Its standard error."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("MAGI_ATTENTION_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=CALLS[call])],
        env=inherited | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stderr


@pytest.mark.parametrize("call", CALLS)
def test_variables_give_one_warning_at_the_first_call(call: str) -> None:
    said = run(call, {"MAGI_ATTENTION_DETERMINISTIC_MODE": "1", "MAGI_ATTENTION_NO_SUCH": "1"})
    before, after = said.split("imported")
    assert "MAGI_ATTENTION" not in before and after.count("UserWarning") == 1, said
    assert "MAGI_ATTENTION_DETERMINISTIC_MODE (MagiConfig(deterministic=True) does it)" in after
    assert "MAGI_ATTENTION_NO_SUCH (no effect)" in after
    assert (
        "reads no MAGI_ATTENTION_* variable but QO_COMM, got" in after and "; unset them" in after
    )
    assert "<string>" in after, "the warning points at the caller"


def test_without_variables_nothing_is_said() -> None:
    assert "Warning" not in run("flex", {})


def test_qo_comm_lets_plans_send_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [MagiConfig(send_queries=False), MagiConfig()]
    for value, got in (("1", [False, True]), ("0", [False, None])):
        monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", value)
        configs = [api.DistAttnConfig(magi_config=config).engine_config() for config in asked]
        assert [config.send_queries for config in configs] == got
    assert "Warning" not in run("flex", {"MAGI_ATTENTION_QO_COMM": "1"})


def test_what_happens_instead_names_what_exists() -> None:
    for text in INSTEAD.values():
        for part in text.split("MagiConfig(")[1:]:
            assert hasattr(MagiConfig(), part.split("=")[0])


def test_a_process_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_told", False)
    monkeypatch.setenv("MAGI_ATTENTION_PRECISION", "bf16")
    with pytest.warns(UserWarning, match=r"MAGI_ATTENTION_PRECISION \(the dtype of q, k") as said:
        renamed.tell_about_environment()
        renamed.tell_about_environment()
    assert len(said) == 1
