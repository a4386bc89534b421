"""Which version's names these are, what became of older ones, and of its variables."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from megatron_magi.magi_attention import replaced
from megatron_magi.magi_attention.environment import INSTEAD

V1_1_1 = """
magi_attn_varlen_key magi_attn_varlen_dispatch magi_attn_flex_key magi_attn_flex_dispatch dispatch
undispatch roll roll_simple calc_attn clear_cache get_most_recent_key get_position_ids
make_varlen_key_for_new_mask_after_dispatch make_flex_key_for_new_mask_after_dispatch
flex_flash_attn_func compute_pad_size squash_batch_dim infer_varlen_mask_from_batch
infer_attn_mask_from_sliding_window infer_attn_mask_from_cu_seqlens AttnForwardMeta AttnMaskType
AttnOverlapMode AttnRanges DistAttnRuntimeKey GeneralAttnMaskType DistAttnConfig DispatchConfig
OverlapConfig GrpCollConfig DispatchAlg MinHeapDispatchAlg ToppHeapDispatchAlg
SequentialDispatchAlg SortedSequentialSelectAlg LBDispatchAlg DPDispatchAlg BSDispatchAlg OverlapAlg
UniformOverlapAlg GreedyOverlapAlg DistAttnRuntimeDictManager dist_attn_runtime_dict_mgr
"""
"""Everything that its `magi_attention.api` names."""

V1_0 = """
full_attention_to_varlen_attention from_mask init_hierarchical_mesh infer_attn_mask_from_window_size
"""
"""What `magi_attention.api` named in some v1.0 and names no more."""


def test_every_published_name_is_here_or_says_what_replaced_it() -> None:
    assert api.MAGI_ATTENTION_VERSION == "1.1.1" and "v1.1.1" in (api.__doc__ or "")
    absent = [name for name in V1_1_1.split() if name not in api.__all__]
    assert absent == ["DistAttnRuntimeDictManager", "dist_attn_runtime_dict_mgr"]
    assert {*absent, *V1_0.split()} <= set(replaced.REPLACED)
    assert not set(replaced.REPLACED) & set(api.__all__)


@pytest.mark.parametrize("name", replaced.REPLACED)
def test_an_old_name_says_what_to_use(name: str) -> None:
    words = f"MagiAttention v1.1.1.*got {name!r}; use "
    with pytest.raises(ImportError, match=words):
        getattr(api, name)
    with pytest.raises(ImportError, match=words):  # Python hides an AttributeError's words here
        exec(f"from megatron_magi.magi_attention import {name}")
    named = replaced.REPLACED[name].split(",")[0].split("(")[0].strip()
    if not named.startswith("nothing"):
        module, _, function = named.partition(";")[0].rpartition(".")
        assert hasattr(
            import_module(module or "megatron_magi.magi_attention"), function.split(" ")[0]
        )


def test_an_unknown_name_is_an_ordinary_error() -> None:
    assert not hasattr(api, "magi_attn_fused_key")
    with pytest.raises(AttributeError, match="no attribute 'magi_attn_fused_key'"):
        _ = api.magi_attn_fused_key


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
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MAGI_ATTENTION_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=CALLS[call])],
        env=environment | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stderr


@pytest.mark.parametrize("call", CALLS)
def test_variables_give_one_warning_at_the_first_call(call: str) -> None:
    said = run(call, {"MAGI_ATTENTION_DETERMINISTIC_MODE": "1", "MAGI_ATTENTION_NO_SUCH": "1"})
    before, after = said.split("imported")
    assert "MAGI_ATTENTION" not in before and after.count("UserWarning") == 1, said
    assert "MAGI_ATTENTION_DETERMINISTIC_MODE (MagiConfig(deterministic=True) does it)" in after
    assert "MAGI_ATTENTION_NO_SUCH (no effect)" in after
    assert "reads no MAGI_ATTENTION_* variable, got" in after and "; unset them" in after
    assert "<string>" in after, "the warning points at the caller"


def test_without_variables_nothing_is_said() -> None:
    assert "Warning" not in run("flex", {})


def test_what_happens_instead_names_what_exists() -> None:
    for text in INSTEAD.values():
        for part in text.split("MagiConfig(")[1:]:
            assert hasattr(MagiConfig(), part.split("=")[0])


def test_the_short_name_has_the_same_names() -> None:
    short = import_module("megatron_magi.api")
    assert short.__all__ == api.__all__
    assert all(getattr(short, name) is getattr(api, name) for name in api.__all__)
    with pytest.raises(ImportError, match=r"use megatron_magi\.masks\.from_dense"):
        exec("from megatron_magi.api import from_mask")
    with pytest.raises(AttributeError, match="has no attribute 'magi_attn_fused_key'"):
        _ = short.magi_attn_fused_key
