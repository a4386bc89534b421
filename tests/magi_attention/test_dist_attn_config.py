"""MagiAttention's configs: defaults, what reaches the engine, what has no effect."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from tests.magi_attention.one_rank import varlen_key

DYNAMIC = api.AttnOverlapMode.DYNAMIC
UNUSED = [name for name in api.__all__ if name.endswith("Alg")]


def test_config_reaches_the_engine() -> None:
    config = api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(chunk_size=4, alg=api.ToppHeapDispatchAlg(top_p=0.5)),
        overlap_config=api.OverlapConfig(degree=3, min_chunk_size=1),
        grpcoll_config=api.GrpCollConfig(num_sms=8),
        magi_config=MagiConfig(deterministic=True, chunk_size=99),
    )
    key = varlen_key(dist_attn_config=config)
    assert key.plan.config == MagiConfig(chunk_size=4, overlap_degree=3, deterministic=True)
    assert key.chunk_size == 4 and key.dist_attn_config is config
    dynamic = api.OverlapConfig(mode=DYNAMIC, degree=None)
    assert api.DistAttnConfig(overlap_config=dynamic).engine_config().overlap_degree is None
    assert api.DistAttnConfig().engine_config() == MagiConfig(overlap_degree=1)


def test_defaults_of_the_configs() -> None:
    c = api.DistAttnConfig()
    assert c == api.DistAttnConfig() and hash(c) == hash(api.DistAttnConfig())
    assert c.dispatch_config == api.DispatchConfig(None, False, api.MinHeapDispatchAlg())
    assert c.overlap_config == api.OverlapConfig(
        api.AttnOverlapMode.STATIC, 1, 8, 512, 64, api.UniformOverlapAlg(False, None), 1.0, 1.0
    )


def test_equal_numbers_of_other_libraries_make_equal_configs() -> None:
    spelled = api.DispatchConfig(chunk_size=np.int64(4)), api.OverlapConfig(degree=np.int32(3))
    plain = api.DispatchConfig(chunk_size=4), api.OverlapConfig(degree=3)
    assert spelled == plain and hash(spelled) == hash(plain)
    assert (type(spelled[0].chunk_size), type(spelled[1].degree)) == (int, int)


@pytest.mark.parametrize("mode", api.AttnOverlapMode)
@pytest.mark.parametrize("given", [None, 0, 1, 2, 64])
def test_the_degree_says_how_many_stages_whatever_the_mode(given: int | None, mode: Any) -> None:
    config = api.OverlapConfig(mode=mode, degree=given)
    assert api.DistAttnConfig(overlap_config=config).engine_config().overlap_degree == given


def test_our_own_config_keeps_its_other_fields() -> None:
    ours = MagiConfig(max_imbalance=1.5, forward_mode="staged", kernel_backend="reference")
    engine = api.DistAttnConfig(magi_config=ours).engine_config()
    changed = {
        f.name for f in fields(MagiConfig) if getattr(engine, f.name) != getattr(ours, f.name)
    }
    assert changed == {"overlap_degree"}


@pytest.mark.parametrize("name", UNUSED)
def test_an_algorithm_of_theirs_changes_no_plan_and_no_key(name: str) -> None:
    made = getattr(api, name)(0.5, top_p=0.5)
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(alg=made))
    key = varlen_key(dist_attn_config=config)
    assert key.plan == varlen_key().plan and key == varlen_key()
    assert made.top_p == 0.5 and repr(made) == "Unused(top_p=0.5)"
