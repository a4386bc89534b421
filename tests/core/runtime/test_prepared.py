"""What a device holds of a plan: made once, by one upload, and gone with the plan."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_magi as magi
from megatron_magi import AttnPlan, HeadShape, masks
from megatron_magi.core.comm import prepared_cast
from megatron_magi.core.cuda import tables
from megatron_magi.core.cuda.tables import DeviceBuffer, DeviceTable
from megatron_magi.core.kernel import work_lists
from megatron_magi.core.plan import make_attn_plan
from megatron_magi.core.runtime.dist_attn import dist_attn_and_max_logits
from megatron_magi.core.runtime.prepared import PreparedPlan, cached_on, prepare
from tests.core.comm.cast_cases import check_cast
from tests.dense import random_mask
from tests.knobs import magi_config

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = HeadShape(2, 1, 4)
MODES = ["at_once", "local_first", "staged"]


def make_plan(mode: str = "staged", degree: int = 2, cp_size: int = 3, seed: int = 0) -> AttnPlan:
    config = magi_config(overlap_degree=degree, forward_mode=mode)
    return make_attn_plan(random_mask(seed, 60, 60), cp_size, SHAPE, config)


def test_a_plan_is_prepared_once() -> None:
    plan = make_plan()
    first = prepare(plan, 1, "cpu")
    assert prepare(plan, np.int64(1), CPU) is first and first.view is plan.rank_plan(1)
    tables = {id(stage.table) for stage in (*first.forward, *first.backward)}
    assert len(tables) == len(first.forward), "a staged forward and the backward share them"


def test_ranks_and_devices_do_not_mix() -> None:
    plan = make_plan()
    made = {(r, d): prepare(plan, r, d) for r in range(3) for d in (CPU, META)}
    assert len({id(ready) for ready in made.values()}) == 6
    for (rank, device), ready in made.items():
        assert (ready.view.rank, ready.device) == (rank, device)
        assert prepare(plan, rank, device) is ready
    held = [{id(s.table) for s in (*x.forward, *x.backward)} for x in made.values()]
    assert sum(map(len, held)) == len(set().union(*held))


def test_equal_plans_have_their_own() -> None:
    first, second = make_plan(), make_plan()
    assert first == second and prepare(first, 0, CPU) is not prepare(second, 0, CPU)


def use(plan: AttnPlan) -> list[object]:
    """All that is kept with a plan and its layout, by weak reference."""
    ready = prepare(plan, 0, CPU)
    magi.position_ids(plan, 0)
    if plan.cp_size == 1:
        x = torch.randn(plan.layout.num_local_tokens, 2, 4)
        magi.shift_tokens(magi.undispatch(x[:60], plan, None), 1, plan, None)
        magi.dist_attn(x, x[:, :1], x[:, :1], plan, None)
        dist_attn_and_max_logits(x, x[:, :1], x[:, :1], plan, None)
    return [weakref.ref(stage.table) for stage in (*ready.forward, *ready.backward)]


@pytest.mark.parametrize("cp_size", [1, 3])
def test_it_goes_with_the_plan(cp_size: int) -> None:
    plan = make_plan(cp_size=cp_size)
    held = use(plan)
    alive = [weakref.ref(plan), weakref.ref(plan.layout), *held]
    assert len(alive) > 2 and all(ref() is not None for ref in alive)
    gc.disable()  # nothing refers back to the plan, so no collector is needed
    try:
        del plan
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_a_second_mask_shares_what_the_layout_keeps() -> None:
    first = make_plan()
    window = masks.sliding_window(60, (5, 0))
    second = make_attn_plan(window, 3, SHAPE, first.config, layout=first.layout)
    magi.position_ids(first, 2)
    before = dict(first.layout._kept.prepared)
    magi.position_ids(second, 2)
    assert second.layout._kept.prepared == before and len(before) == 1


def test_the_first_thread_counts() -> None:
    plan = make_plan()

    def make() -> str:
        cached_on(plan, "key", lambda: "the other thread's")
        return "ours"

    assert cached_on(plan, "key", make) == "the other thread's"


def check_prepared(plan: AttnPlan, rank: int) -> PreparedPlan:
    uploads: list[DeviceBuffer] = []
    plain = prepared_cast.upload_together

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[DeviceTable]:
        made = plain(arrays, device)
        uploads.extend(table.buffer for table in made)
        return made

    with mock.patch.object(prepared_cast, "upload_together", counted):
        ready = prepare(plan, rank, CPU)
    assert len({id(buffer) for buffer in uploads}) <= 1
    view = plan.rank_plan(rank)
    own, *remote = view.stages
    for stages, planned in ((ready.forward, view.forward_stages), (ready.backward, (*remote, own))):
        used = [s for s in planned if s.num_keys or s.cast is not None]
        for made, stage in zip(stages, used, strict=True):
            table = made.table
            assert table.slices is stage.slices and table.left_rows is stage.left_rows
            assert (table.num_q, table.num_k) == (view.num_local_tokens, stage.num_keys)
            assert made.num_own == stage.num_own and made.sees == (len(stage.slices) > 0)
            assert (made.cast is None) == (stage.cast is None)
            if made.cast is not None and stage.cast is not None:
                check_cast(made.cast, stage.cast, table.num_q, stage in view.stages)
                held = [
                    made.cast.send,
                    made.cast.own,
                    made.cast.sources and made.cast.sources.begin,
                ]
                assert {id(t.buffer) for t in held if t is not None} == {id(uploads[0])}
    assert ready.merges == view.forward_merges
    assert ready.is_alone == (len(view.stages) == 1 and own.cast is None)
    return ready


@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 60),
    cp_size=st.integers(1, 6),
    degree=st.integers(0, 4),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=80, deadline=None)
def test_any_plan_is_what_one_makes_by_hand(
    seed: int, length: int, cp_size: int, degree: int, mode: str
) -> None:
    config = magi_config(overlap_degree=degree, forward_mode=mode)
    plan = make_attn_plan(random_mask(seed, length, length), cp_size, SHAPE, config)
    for rank in range(cp_size):
        check_prepared(plan, rank)


def test_casts_of_the_same_rows_share_their_tables() -> None:
    """A forward in one go sends the rows that the backward's one remote stage sends."""
    ready = check_prepared(make_plan("local_first", degree=1, seed=5), 0)
    (forward,) = [s.cast for s in ready.forward if s.cast is not None]
    (backward,) = [s.cast for s in ready.backward if s.cast is not None]
    assert forward is not backward and forward.send is backward.send


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tables_of_one_upload(dtype: type) -> None:
    arrays = [np.arange(n, dtype=dtype) for n in (0, 5, 200)]
    arrays += [np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros((0, 8), np.int32)]
    with torch.inference_mode():
        made = tables.upload_together(arrays, CPU)
    base = made[0].buffer.data.data_ptr()
    for table, array in zip(made, arrays, strict=True):
        assert np.array_equal(table.here().numpy(), array) and table.data.shape == array.shape
        assert not table.data.is_inference() and (table.address - base) % tables.ALIGNMENT == 0
        assert table.data.numel() == 0 or table.address == table.data.data_ptr()
    assert tables.upload_together([], CPU) == []


def test_work_lists_are_made_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our kernels will run; a call then finds what it asks for."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(work_lists, "choose_backend_name", lambda *_: "cuda")
    config = magi_config(overlap_degree=2, forward_mode="local_first", deterministic=True)
    for widths, compiled in (((64, 64), (64, 64)), ((80, 80), (96, 96)),
                             ((192, 128), (192, 128)), ((224, 64), (256, 256)),
                             ((320, 64), None)):  # fmt: skip
        heads, is_ours = HeadShape(4, 2, widths[0], head_dim_v=widths[1]), compiled is not None
        plan = make_attn_plan(masks.causal(300), 2, heads, config)
        ready = prepare(plan, 1, CPU)
        shape = (4, 2, *(compiled or widths), CPU)
        for number, stage in enumerate(ready.forward):
            assert (("fwd", shape) in stage.table.cache) == (
                is_ours and (stage.sees or number == 0)
            )
        for stage in ready.backward:
            key = ("bwd", shape, True)
            assert (key in stage.table.cache) == (is_ours and stage.sees)


def test_other_backends_have_no_work_lists() -> None:
    ready = prepare(make_attn_plan(masks.causal(64), 2, HeadShape(4, 2, 64), magi_config()), 0, CPU)
    assert all(stage.table.cache == {} for stage in (*ready.forward, *ready.backward))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_call_on_a_gpu_finds_all_that_another_thread_prepared() -> None:
    plan = make_attn_plan(masks.causal(300), 1, HeadShape(4, 2, 64), magi_config())
    device = torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(prepare, plan, 0, device).result()
    assert ready is prepare(plan, 0, "cuda") and ready.device == device
    made = {key for stage in ready.forward for key in stage.table.cache}
    assert {key[0] for key in made} == {"fwd", "bwd"}
    q, k = (torch.randn(300, h, 64, device=device).bfloat16().requires_grad_() for h in (4, 2))
    with mock.patch.object(DeviceBuffer, "upload", side_effect=AssertionError("an upload")):
        magi.dist_attn(q, k, k, plan, None)[0].sum().backward()
    kept = {key for stage in ready.forward for key in stage.table.cache}
    assert kept - made <= {"forwards", "backwards"}  # launches to repeat, which a call notes
