"""What the planner chooses by itself follows the costs it was given."""

from megatron_magi import AttnPlan, HeadShape, masks
from megatron_magi.core.plan import make_attn_plan
from tests.knobs import magi_config


def plan(**config: float) -> AttnPlan:
    mask = masks.causal(2**17)
    return make_attn_plan(mask, 8, HeadShape(32, 8, 128), magi_config(**config))  # type: ignore[arg-type]


def test_stages_hide_communication_until_they_cost_more_than_they_hide() -> None:
    slow_link, free = plan(link_gib_s=25.0, stage_latency_us=0.0), plan(stage_latency_us=0.0)
    assert slow_link.overlap_degree >= 1 and free.overlap_degree >= 1
    assert plan(link_gib_s=25.0, stage_latency_us=1e6).overlap_degree == 0
    assert plan(link_gib_s=1e9).overlap_degree == 0, "nothing to hide"


def test_the_forward_waits_for_as_little_as_it_can() -> None:
    packed = masks.from_cu_seqlens([0, *range(3000, 65536, 3000), 65536])
    heads = HeadShape(32, 8, 128)
    assert make_attn_plan(packed, 8, heads, magi_config()).forward_mode == "local_first"
    assert plan(link_gib_s=25.0).forward_mode == "staged", "few rows see own keys only"
    assert plan(link_gib_s=1e9).forward_mode == "at_once", "nothing to hide"
    assert plan(link_gib_s=25.0, memory_gib_s=1.0).forward_mode != "staged", "sums cost too much"
    alone = masks.from_cu_seqlens([0, *range(8192, 65537, 8192)])
    assert make_attn_plan(alone, 8, heads, magi_config()).forward_mode == "at_once", "no exchange"
    for mode in ("at_once", "local_first", "staged"):
        given = make_attn_plan(packed, 8, heads, magi_config(overlap_degree=2, forward_mode=mode))
        assert given.forward_mode == mode and given.overlap_degree == 2
    assert make_attn_plan(packed, 8, heads, magi_config(overlap_degree=2)).forward_mode != "staged"


def test_any_cost_is_a_cost() -> None:
    """None overflows, and none keeps a plan from being made."""
    assert plan(link_gib_s=1e-12).forward_mode == "staged"
    assert plan(kernel_tflops=1e-12).overlap_degree >= 0
    assert plan(memory_gib_s=1e-12).forward_mode != "staged"
    assert plan(stage_latency_us=1e15).overlap_degree == 0
    assert plan(link_gib_s=1e15, stage_latency_us=0.0).forward_mode == "at_once"


def test_the_chosen_chunks_keep_the_load_cap() -> None:
    ends = [0, 3000, 3100, 9000, 9500, 26000, 40000, 41000, 65536]
    for cp_size in (2, 4, 8):
        made = make_attn_plan(
            masks.from_cu_seqlens(ends), cp_size, HeadShape(32, 8, 128), magi_config()
        )
        assert made.imbalance <= 1.01
