"""Megatron's training program without CUDA: what it is told, and that CUDA keeps its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.datasets import utils

from megatron_magi.launcher import cpu
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels


def initialize_megatron(extra: int = 0, allow_no_cuda: bool = False) -> tuple[int, bool]:
    return extra, allow_no_cuda


def set_jit_fusion_options() -> None:
    raise AssertionError("Megatron's fusions were warmed up")


class Megatron:
    """`megatron.training` and a script that has imported from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialize = ModuleType("megatron.training.initialize")
        self.training = ModuleType("megatron.training.training")
        self.script = ModuleType("a_pretrain_script")
        self.queues: list[bool] = []
        self.is_async = False
        package = ModuleType("megatron.training")
        package.initialize, package.training = self.initialize, self.training  # type: ignore[attr-defined]
        for module in (self.initialize, self.training, self.script):
            module.initialize_megatron = initialize_megatron  # type: ignore[attr-defined]
            module.set_jit_fusion_options = set_jit_fusion_options  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, "megatron.training", package)
        written = self.queues
        arguments = ModuleType("megatron.training.global_vars")
        arguments.get_args = lambda: SimpleNamespace(async_save=self.is_async)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, arguments.__name__, arguments)
        monkeypatch.setattr(
            cpu, "write_checkpoints_in_process", lambda is_async: written.append(not is_async)
        )


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Megatron]:
    """What is set in torch.cuda and here is put back."""
    before = dict(vars(torch.cuda))
    ours = sys.modules[__name__]
    monkeypatch.setattr(ours, "initialize_megatron", initialize_megatron)
    yield Megatron(monkeypatch)
    for name in set(vars(torch.cuda)) - set(before):
        delattr(torch.cuda, name)
    vars(torch.cuda).update(before)


def test_with_cuda_nothing_changes(megatron: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "install_cpu_runtime", lambda: False)
    before = dict(vars(torch.cuda))
    assert install_cpu_training() is False
    assert megatron.script.initialize_megatron() == (0, False) and megatron.queues == []
    assert dict(vars(torch.cuda)) == before


def test_without_cuda_megatron_trains_all_the_same(
    megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "install_cpu_runtime", lambda: True)
    assert install_cpu_training() is True
    for module in (megatron.initialize, megatron.training, megatron.script):
        assert module.initialize_megatron(extra=5) == (5, True), module.__name__
    megatron.initialize.set_jit_fusion_options()
    megatron.training.set_jit_fusion_options()
    assert megatron.queues == [True] * 3  # saves are known to be synchronous once arguments are
    megatron.is_async = True
    megatron.script.initialize_megatron()  # type: ignore[attr-defined]
    assert megatron.queues[-1] is False


def test_a_megatron_without_its_training_program_ends_in_one_line(
    megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "install_cpu_runtime", lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.training", None)  # type: ignore[arg-type]
    with pytest.raises(
        ImportError, match=r"requires a Megatron with its training program .*0\.19\.2"
    ):
        install_cpu_training()


def test_megatron_finds_a_device(megatron: Megatron) -> None:
    """One, new enough for every check, with memory that a report can divide by."""
    cpu._describe_a_device()
    cuda: Any = torch.cuda
    properties = cuda.get_device_properties(0)
    assert cuda.device_count() == 1 and cuda.get_device_name() == properties.name == "CPU"
    assert cuda.get_device_capability(device="cuda") == (properties.major, properties.minor)
    assert properties.major >= 8 and cuda.mem_get_info() == (properties.total_memory,) * 2
    assert properties.total_memory > 2**30
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved",
                 "max_memory_reserved", "device_memory_used"):  # fmt: skip
        assert getattr(cuda, name)() == 0
    assert cuda.memory_stats().get("allocated_bytes.all.current", 0) == 0
    for name in ("empty_cache", "reset_peak_memory_stats", "set_stream"):
        assert getattr(cuda, name)("anything") is None


@pytest.mark.parametrize("source", [False, True])
def test_helpers_are_compiled_in_a_source_tree_alone(
    source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has them built, and no Makefile."""
    compiled: list[str] = []
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.setattr(utils, "compile_helpers", functools.partial(compiled.append, "made"))
    if source:
        (tmp_path / "Makefile").write_text("default:\n")
    skip_compilation_of_wheels()
    utils.compile_helpers()
    assert compiled == (["made"] if source else [])
