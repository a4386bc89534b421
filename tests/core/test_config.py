"""MagiConfig: one spelling of every value, three-part errors."""

import dataclasses

import numpy as np
import pytest

from megatron_magi import CostTable, HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan
from tests.knobs import magi_config


def test_equal_configs_have_equal_digests() -> None:
    """A rank that spells a number otherwise plans the same thing."""
    spelled = magi_config(max_imbalance=2, tile_q=np.int64(64), link_gib_s=np.float32(100),
                          overlap_degree=np.int64(3), deterministic=np.True_,  # type: ignore[arg-type]
                          kernel_backend=np.str_("flex"))  # type: ignore[arg-type]  # fmt: skip
    plain = magi_config(max_imbalance=2.0, tile_q=64, link_gib_s=100.0, overlap_degree=3,
                        deterministic=True, kernel_backend="flex")  # fmt: skip
    plans = [make_attn_plan(masks.causal(64), 2, HeadShape(2, 1, 4), c) for c in (spelled, plain)]
    assert spelled == plain and plans[0].digest == plans[1].digest
    assert repr(spelled) == repr(plain)
    types = [[type(getattr(c, f.name)) for f in dataclasses.fields(c)] for c in (spelled, plain)]
    assert types[0] == types[1]


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("agreement_timeout_s", 1e10, "finite and at most 1000000000, got 1"),
        ("overlap_degree", 65, "between 0 and 64, or None, got 65"),
        ("forward_mode", "fast", "must be one of .*'local_first'.* got 'fast'"),
        ("transport", "best", "must be one of .*'symm_mem'.* got 'best'"),
        ("kernel_backend", "fa3", "must be one of"),
    ],
)
def test_bad_values_are_refused(field: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        magi_config(**{field: value})


def test_none_at_all_may_be_asked_for() -> None:
    assert MagiConfig(overlap_degree=0).overlap_degree == 0
    assert CostTable(swap_trials=0).swap_trials == 0
    assert CostTable(stage_latency_us=0).stage_latency_us == 0.0


def test_what_is_exact_is_the_default() -> None:
    """Partial gradients travel in fp32, and no rank gives up speed for equal bits unasked."""
    config = magi_config()
    assert config.dkv_reduce_in_fp32 is True and config.deterministic is False


@pytest.mark.parametrize("field", ["link_gib_s", "kernel_tflops", "tile_q", "swap_trials"])
def test_fields_of_the_cost_table_are_named_with_it(field: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{field}'"):
        MagiConfig(**{field: 128})


def test_a_user_faces_at_most_eleven_knobs_beside_the_cost_table() -> None:
    knobs = [f.name for f in dataclasses.fields(MagiConfig) if f.name != "costs"]
    assert len(knobs) <= 11
