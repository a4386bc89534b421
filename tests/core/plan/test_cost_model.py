"""What the planner chooses by itself follows the costs it was given."""

from megatron_magi import AttnPlan, HeadShape, MagiConfig, masks
from megatron_magi.core.plan import make_attn_plan


def plan(**config: float) -> AttnPlan:
    mask = masks.causal(2**17)
    return make_attn_plan(mask, 8, HeadShape(32, 8, 128), MagiConfig(**config))  # type: ignore[arg-type]


def test_stages_hide_communication_until_they_cost_more_than_they_hide() -> None:
    slow_link, free = plan(link_gib_s=25.0, stage_latency_us=0.0), plan(stage_latency_us=0.0)
    assert slow_link.overlap_degree >= 1 and free.overlap_degree >= 1
    assert plan(link_gib_s=25.0, stage_latency_us=1e6).overlap_degree == 0
    assert plan(link_gib_s=1e9).overlap_degree == 0, "nothing to hide"


def test_the_chosen_chunks_keep_the_load_cap() -> None:
    ends = [0, 3000, 3100, 9000, 9500, 26000, 40000, 41000, 65536]
    for cp_size in (2, 4, 8):
        made = make_attn_plan(
            masks.from_cu_seqlens(ends), cp_size, HeadShape(32, 8, 128), MagiConfig()
        )
        assert made.imbalance <= 1.01
