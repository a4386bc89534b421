"""Settings of a job that this machine cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.constraints import refusals, refuse_arguments
from megatron_magi.launcher.machine_constraints import machine_refusals
from tests.launcher.few_arguments import arguments


@pytest.mark.parametrize(
    ("magi", "text"),
    [
        ({"kernel_backend": "cuda"}, r"needs CUDA tensors, got cpu;.*\(--magi-kernel cuda\)"),
        ({"kernel_backend": "flex"}, r"needs CUDA tensors, got cpu;.*\(--magi-kernel flex\)"),
        ({"transport": "symm_mem"}, "--magi-transport symm_mem requires GPUs of one host"),
    ],
)
def test_what_this_machine_lacks_is_one_line(
    magi: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse_arguments(arguments(), MagiConfig(kernel_backend="reference", transport="all_to_all"))
    with pytest.raises(SystemExit, match=text):
        refuse_arguments(arguments(), MagiConfig(**magi))


def test_a_checkpoint_worker_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would die, and the first save wait for it for ever."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    saves = {"async_save": True, "use_persistent_ckpt_worker": True}
    with pytest.raises(SystemExit, match="--use-persistent-ckpt-worker requires a GPU"):
        refuse_arguments(arguments(**saves))
    refuse_arguments(arguments(**{**saves, "async_save": False}))


@pytest.mark.parametrize(
    "name", ["tensor_model_parallel_size", "num_attention_heads", "num_query_groups", "seq_length"]
)
def test_sizes_below_one_are_one_line(name: str) -> None:
    given = arguments(**{name: 0}, attention_dropout=0.1)
    flag = name.replace("_", "-")
    assert refusals(given, MagiConfig(kernel_backend="reference")) == [
        f"--{flag} must be at least 1, got 0; change it"
    ]
    assert machine_refusals(given, MagiConfig(kernel_backend="reference")) == []


def test_multi_token_prediction_needs_transformer_engine_in_one_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_magi.launcher import machine_constraints as rules

    given = arguments(mtp_num_layers=1)
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    for version, count in (((0, 19, 2), 0), ((0, 20, 0), 1)):
        monkeypatch.setattr(rules, "MEGATRON_VERSION", version)
        lines = refusals(given)
        assert len(lines) == count and all("--mtp-num-layers requires" in line for line in lines)
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: object())
    assert not refusals(given)


def test_heads_that_a_checkpoint_brings_are_no_question_for_a_kernel() -> None:
    given = arguments(num_attention_heads=None, hidden_size=None)
    assert not refusals(given, MagiConfig(kernel_backend="reference"))
