"""What a machine takes for each fused part, and which of Megatron's flags follow."""

import pytest
import torch

from megatron_magi.adapter.fused import parts
from megatron_magi.adapter.fused.parts import FusedParts, choose_parts


@pytest.fixture
def machine(monkeypatch):
    """Sets what a machine has: CUDA, packages, apex, an addmm with another output dtype."""

    def make(*packages, cuda=True, apex=False, addmm=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(parts, "_importable", lambda package: package in packages)
        monkeypatch.setattr(parts, "has_apex", lambda: apex)
        monkeypatch.setattr(parts, "has_addmm", lambda: addmm)

    return make


def test_triton_and_torch_are_enough(machine):
    machine("triton")
    assert choose_parts("auto") == FusedParts("triton", "megatron", "triton", "addmm")
    assert choose_parts("off") == FusedParts() == FusedParts(*["plain"] * 4)


def test_what_is_there_comes_first(machine):
    machine("triton", "transformer_engine", apex=True)
    assert choose_parts("auto") == FusedParts("te", "megatron", "triton", "apex")


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({"cuda": False}, FusedParts()),
        ({}, FusedParts(weight_grad="addmm")),
        ({"addmm": False}, FusedParts()),
    ],
    ids=["no_cuda", "no_triton", "nothing"],
)
def test_what_is_missing_is_done_plainly(machine, has, expected):
    machine(*(["triton"] if has.get("cuda") is False else []), **has)
    assert choose_parts("auto") == expected


def test_megatrons_flags_follow_the_parts():
    names = ("bias_activation_fusion", "gradient_accumulation_fusion")
    plain = dict.fromkeys(names, False)
    assert FusedParts().config_fields() == plain
    assert FusedParts(cross_entropy="triton", qkv_rope="triton").config_fields() == plain
    both = dict.fromkeys(names, True)
    assert FusedParts(swiglu="megatron", weight_grad="addmm").config_fields() == both
    assert FusedParts(swiglu="megatron").config_fields() == plain | {names[0]: True}
    loss = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    assert FusedParts(cross_entropy="te").config_fields() == plain | loss
