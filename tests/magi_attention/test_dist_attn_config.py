"""MagiAttention's configs: defaults, what reaches our engine, what does not fit together."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megatron_magi import MagiConfig
from megatron_magi import magi_attention as api
from tests.magi_attention.one_rank import varlen_key

DYNAMIC = api.AttnOverlapMode.DYNAMIC
ALGORITHMS = (api.LBDispatchAlg, api.DPDispatchAlg, api.BSDispatchAlg, api.MinHeapDispatchAlg,
              api.ToppHeapDispatchAlg, api.SequentialDispatchAlg,
              api.SortedSequentialSelectAlg)  # fmt: skip


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
    dynamic = api.OverlapConfig(mode=api.AttnOverlapMode.DYNAMIC, degree=None)
    assert api.DistAttnConfig(overlap_config=dynamic).engine_config().overlap_degree is None
    assert api.DistAttnConfig().engine_config() == MagiConfig(overlap_degree=1)


def test_defaults_of_the_configs() -> None:
    c = api.DistAttnConfig()
    assert c == api.DistAttnConfig() and hash(c) == hash(api.DistAttnConfig())
    assert c.dispatch_config == api.DispatchConfig(None, False, api.MinHeapDispatchAlg())
    assert c.overlap_config == api.OverlapConfig(
        api.AttnOverlapMode.STATIC, 1, 8, 512, 64, api.UniformOverlapAlg(False, None), 1.0, 1.0
    )
    assert c.grpcoll_config == api.GrpCollConfig(24, 8, 256, 16, 128, 2_000_000_000, 0)
    none = api.OverlapConfig(mode=api.AttnOverlapMode.DYNAMIC, degree=0)
    assert none.no_overlap and none.max_num_chunks == 1 and not none.enable
    assert none.mode is api.AttnOverlapMode.STATIC
    assert api.SortedSequentialSelectAlg().allocation_ratio == 1.0


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: api.DispatchConfig(uneven_shard=True), r"got DispatchConfig\(uneven_shard=True\)"),
        (lambda: api.OverlapConfig(alg=api.GreedyOverlapAlg()), "got GreedyOverlapAlg, which no"),
    ],
)
def test_configs_refused_with_meaning(make: Any, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        make()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: api.DispatchConfig(chunk_size=0), "chunk_size must be >= 1 or None, got 0"),
        (lambda: api.OverlapConfig(degree=None), "mode STATIC and none with mode DYNAMIC, got"),
        (lambda: api.OverlapConfig(degree=65), "between 0 and max_num_chunks 64, got 65"),
        (lambda: api.OverlapConfig(degree=-1), "got -1; use 0 to 4"),
        (lambda: api.OverlapConfig(min_chunk_size=0), "min_chunk_size must be > 0, got 0"),
        (lambda: api.OverlapConfig(comm_cost_factor=0.0), "comm_cost_factor must be > 0"),
        (
            lambda: api.OverlapConfig(mode=DYNAMIC, degree=2),
            "none with mode DYNAMIC, got .* and degree 2",
        ),
        (lambda: api.OverlapConfig(degree=5, max_num_chunks=4), "max_num_chunks 4, got 5; use 0"),
        (lambda: api.OverlapConfig(max_num_chunks=0), "max_num_chunks must be > 0, got 0"),
        (lambda: api.OverlapConfig(dynamic_max_degree=0), "dynamic_max_degree must be > 0, got 0"),
        (lambda: api.OverlapConfig(calc_cost_factor=-1.0), "calc_cost_factor must be > 0, got -1"),
        (lambda: api.GrpCollConfig(num_sms=-1), r"GrpCollConfig\.num_sms must be at least 0"),
    ],
)
def test_wrong_values(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: api.DispatchConfig(chunk_size=1.5), r"DispatchConfig\.chunk_size must be an int"),
        (
            lambda: api.DispatchConfig(alg="lb"),
            r"alg must be a DispatchAlg, got 'lb'; pass MinHeap",
        ),
        (lambda: api.DispatchConfig(alg=api.UniformOverlapAlg()), "must be a DispatchAlg"),
        (lambda: api.DispatchConfig(uneven_shard=0), "uneven_shard must be True or False, got 0"),
        (lambda: api.OverlapConfig(mode="static"), "mode must be an AttnOverlapMode, got 'static'"),
        (lambda: api.OverlapConfig(alg=api.MinHeapDispatchAlg()), "alg must be an OverlapAlg"),
        (lambda: api.OverlapConfig(degree=True), r"OverlapConfig\.degree must be an integer"),
        (lambda: api.OverlapConfig(min_chunk_size=None), "min_chunk_size must be an integer"),
        (lambda: api.OverlapConfig(calc_cost_factor="1"), "calc_cost_factor must be a number"),
        (lambda: api.UniformOverlapAlg(random_costs=1), "random_costs must be True or False"),
        (lambda: api.UniformOverlapAlg(random_seed=0.5), "random_seed must be an integer"),
        (lambda: api.ToppHeapDispatchAlg(top_p="1"), "top_p must be a number, got '1'"),
        (lambda: api.SortedSequentialSelectAlg(None), "allocation_ratio must be a number"),
        (lambda: api.GrpCollConfig(num_nvl_bytes=2e9), "num_nvl_bytes must be an integer"),
        (lambda: api.DistAttnConfig(MagiConfig()), "dispatch_config must be a DispatchConfig"),
        (lambda: api.DistAttnConfig(overlap_config={}), r"got \{\}; pass OverlapConfig\(\)"),
        (lambda: api.DistAttnConfig(grpcoll_config=3), "grpcoll_config must be a GrpCollConfig"),
        (lambda: api.DistAttnConfig(magi_config=None), "magi_config must be a MagiConfig, got No"),
    ],
)
def test_values_of_another_kind(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_equal_numbers_of_other_libraries_make_equal_configs() -> None:
    spelled = api.DispatchConfig(chunk_size=np.int64(4)), api.OverlapConfig(degree=np.int32(3))
    plain = api.DispatchConfig(chunk_size=4), api.OverlapConfig(degree=3)
    assert spelled == plain and hash(spelled) == hash(plain)
    assert (type(spelled[0].chunk_size), type(spelled[1].degree)) == (int, int)


@pytest.mark.parametrize("given", [0, 1, 2, 64])
def test_a_degree_says_whether_communication_is_hidden(given: int) -> None:
    """None or one stage is no question of the mode, as in MagiAttention."""
    config = api.OverlapConfig(degree=given)
    assert (config.no_overlap, config.enable) == (given == 0, given >= 2)
    assert config.max_num_chunks == (1 if given == 0 else 64)
    if given <= 1:
        assert api.OverlapConfig(mode=DYNAMIC, degree=given) == config
    asked = api.DistAttnConfig(overlap_config=config).engine_config()
    assert asked.overlap_degree == given


def test_the_planner_chooses_the_degree() -> None:
    config = api.OverlapConfig(mode=DYNAMIC, degree=None, dynamic_max_degree=None)
    assert config.enable and not config.no_overlap and config.mode is DYNAMIC
    assert config.dynamic_max_degree is None


def test_our_own_config_keeps_its_other_fields() -> None:
    ours = MagiConfig(max_imbalance=1.5, forward_mode="staged", kernel_backend="reference")
    engine = api.DistAttnConfig(magi_config=ours).engine_config()
    changed = {
        f.name for f in fields(MagiConfig) if getattr(engine, f.name) != getattr(ours, f.name)
    }
    assert changed == {"overlap_degree"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_of_theirs_changes_no_plan(algorithm: type) -> None:
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(alg=algorithm()))
    key = varlen_key(dist_attn_config=config)
    assert key.plan == varlen_key().plan
    assert (key == varlen_key()) == (algorithm is api.MinHeapDispatchAlg)
