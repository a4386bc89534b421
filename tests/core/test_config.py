"""MagiConfig: one spelling of every value, three-part errors."""

import dataclasses
import math

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
    "field, value, error, text",
    [
        ("chunk_size", 12.5, TypeError, "must be an integer, got 12.5; leave it out"),
        ("tile_q", None, TypeError, "must be an integer, got None"),
        ("max_imbalance", "1.1", TypeError, "must be a number or None, got '1.1'"),
        (
            "agreement_timeout_s",
            math.inf,
            ValueError,
            "> 0, finite and at most 10.*, got inf",
        ),
        ("agreement_timeout_s", 1e10, ValueError, "finite and at most 1000000000, got 1"),
        ("stage_latency_us", math.nan, ValueError, "must be >= 0 and finite, got nan"),
        ("chunk_size", 0, ValueError, "must be >= 1 or None, got 0"),
        ("overlap_degree", 65, ValueError, "between 0 and 64, or None, got 65"),
        ("forward_mode", "fast", ValueError, "must be one of .*'local_first'.* got 'fast'"),
        ("memory_gib_s", 0, ValueError, "must be > 0 and finite, got 0"),
        ("transport", "best", ValueError, "must be one of .*'symm_mem'.* got 'best'"),
        ("kernel_backend", "fa3", ValueError, "must be one of"),
        ("dkv_reduce_in_fp32", "no", TypeError, "must be True or False, got 'no'"),
        ("keep_received_keys", 1, TypeError, "must be True or False, got 1"),
        ("deterministic", None, TypeError, "must be True or False, got None"),
    ],
)
def test_bad_values_are_refused(field: str, value: object, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
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
    with pytest.raises(ValueError, match=r"MagiConfig\.costs must be a CostTable, got 3"):
        MagiConfig(costs=3)  # type: ignore[arg-type]


def test_a_user_faces_at_most_eleven_knobs_beside_the_cost_table() -> None:
    knobs = [f.name for f in dataclasses.fields(MagiConfig) if f.name != "costs"]
    assert len(knobs) <= 11
