"""Which kernel, transport and layers run on a machine, and the reasons that are given."""

from __future__ import annotations

import pytest

from megatron_magi import requirements
from megatron_magi.cli import doctor
from megatron_magi.cli.check_result import Check

LIBRARY = Check("CUDA library", "ok", "built, lib.so")


def checks(engine: bool = False, apex: bool = False) -> list[Check]:
    """What was found of the packages that decide about layers."""
    found = {"transformer-engine": engine, "apex": apex}
    return [Check(name, "ok" if is_there else "absent", "") for name, is_there in found.items()]


def test_layers_without_transformer_engine() -> None:
    name, why = doctor.layer_choice(checks())
    assert name == "local" and "--transformer-impl local" in why and "hybrid_local_spec" in why
    assert "torch's norms (magi's under sequence parallelism)" in why
    assert "apex's norms" in doctor.layer_choice(checks(apex=True))[1]


@pytest.mark.parametrize("apex", [False, True])
def test_layers_with_transformer_engine(apex: bool) -> None:
    name, why = doctor.layer_choice(checks(engine=True, apex=apex))
    assert name == "transformer_engine" and "magi's core attention" in why


@pytest.mark.parametrize(
    "capability, name, why",
    [((9, 0), "cuda", "the Hopper kernel, because the GPU is sm_90; library: built, lib.so"),
     ((10, 0), "fa4", "FlashAttention-4 with magi's masks, because the GPU is sm_100"),
     ((8, 0), "flex", "torch FlexAttention, because the GPU is sm_80 and magi needs sm_90")],
)  # fmt: skip
def test_kernel_and_transport_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("megatron_magi.core.kernel.flash4.is_installed", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    chosen, reason = doctor.kernel_choice([LIBRARY])
    assert chosen == name and why in reason and "fp32 and fp64 run on the reference" in reason
    chosen, reason = doctor.transport_choice()
    assert chosen == ("symm_mem" if name == "cuda" else "nccl")
    assert "all_to_all with uneven splits over NCCL 2.27.3" in reason


def test_kernel_and_transport_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.kernel_choice([LIBRARY]) == (
        "reference", "blockwise PyTorch on the CPU, because torch has no GPU")  # fmt: skip
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: True)
    assert doctor.transport_choice()[0] == "gloo"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert doctor.transport_choice()[0] == "gloo", "tensors are on the CPU"
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    name, why = doctor.transport_choice()
    assert name == "none" and "only one rank can run" in why


def test_nothing_runs_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise requirements.MissingRequirement("megatron_magi needs torch")

    monkeypatch.setattr(doctor, "check_requirements", missing)
    monkeypatch.setattr(doctor, "torch_or_none", lambda: None)
    assert doctor.kernel_choice([LIBRARY]) == ("none", "megatron_magi needs torch")
    assert doctor.transport_choice() == ("none", "torch is not there")
