"""One backward launch over own and received keys: against fp64, against one buffer with all keys,
and with rows that arrive and gradients that leave while it runs.

A launch may fill every SM with blocks that wait, so what brings rows here needs none: copies from
pinned memory, and the driver's stream memory operations.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import Arrival, AttnCall, GradCall, Pair, Received
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan.travel import Travel
from tests.core.kernel.cuda_bwd_cases import CAPPED, CORNER, IRREGULAR, REGULAR, Case
from tests.core.kernel.test_cuda_bwd import WIDTHS, Run, random_case

BF16, FP32 = torch.bfloat16, torch.float32
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@lru_cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def on_stream(name: str, stream: torch.cuda.Stream, word: Tensor, number: int) -> None:
    """A stream memory operation: cuStreamWriteValue32, or cuStreamWaitValue32 until number."""
    handle, address = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr())
    code = getattr(driver(), f"{name}_v2")(
        handle, address, ctypes.c_uint32(number % 2**32), ctypes.c_uint(0)
    )
    assert code == 0, f"{name}: driver error {code}"


def keep_copying(milliseconds: int) -> None:
    """Occupy the current stream without an SM, as a pause would need: a copy takes about 1 ms."""
    source = torch.zeros(50_000_000, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    for _ in range(milliseconds):
        target.copy_(source, non_blocking=True)


def word(number: int = 0) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device="cuda")


TRAVEL = Travel(3000, 6000)
"""Long enough that blocks start in another order than on one buffer."""


def parted(
    call: AttnCall, num_own: int, arrival: Arrival | None = None, travel: Travel = TRAVEL
) -> AttnCall:
    """The same keys in two buffers, the received ones side by side as they travel."""
    k, v = (x[:num_own].clone() for x in (call.k, call.v))
    both = torch.cat([call.k[num_own:], call.v[num_own:]], -1)
    k2, v2 = both.split((call.k.shape[2], call.v.shape[2]), -1)
    return call._replace(k=k, v=v, received=Received(k2, v2, arrival, travel))


def places(call: AttnCall, dtype: torch.dtype) -> Pair:
    """Room for the gradients of received keys, in rows that hold something else too."""
    assert call.received is not None
    k, v = call.received[:2]
    widths = k.shape[2], v.shape[2], 16
    rows = torch.full((*k.shape[:2], sum(widths)), float("nan"), dtype=dtype, device="cuda")
    dk, dv, _ = rows.split(widths, -1)
    return dk, dv


def launch(call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, those of received keys behind the others, in fp32."""
    from megatron_magi.core.kernel.hopper.backward import backward

    dq, dk, dv = backward(call, grad)
    assert grad.received_dkv is not None
    dk, dv = (
        torch.cat([own.float(), more.float()])
        for own, more in zip((dk, dv), grad.received_dkv, strict=True)
    )
    return dq, dk, dv


def in_two(
    run: Run,
    num_own: int,
    received: torch.dtype = FP32,
    travel: Travel = TRAVEL,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """The case with its keys in two buffers; ``received`` is the dtype of gradients that return."""
    from megatron_magi.core.kernel.hopper import HopperBackend

    call, done = parted(run.call, num_own, travel=travel), word(-1)
    asked = run.grad._replace(received_dkv=places(call, received), done=done.data_ptr(), **options)
    grads = launch(call, asked)
    assert done.item() == HopperBackend.done_count(call, asked.deterministic) - 1
    return grads


def in_one(run: Run, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_magi.core.kernel.hopper.backward import backward

    return backward(run.call, run.grad._replace(**options))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("case", REGULAR + IRREGULAR + CORNER + CAPPED, ids=lambda c: c.name)
def test_gradients(case: Case, deterministic: bool) -> None:
    """At boundaries inside and between key tiles, in both dtypes of each kind of gradient."""
    run, num_k = Run(case), case.mask.total_seqlen_k
    for i, num_own in enumerate(sorted({0, 1, num_k // 3, min(128, num_k), num_k - 1, num_k})):
        own, received = ((FP32, case.dtype)[i >> bit & 1] for bit in (0, 1))
        run.check(in_two(run, num_own, received, dtype=own, deterministic=deterministic))


@pytest.mark.parametrize("block", range(10))
def test_random_masks(block: int) -> None:
    """1,000 masks and boundaries by seed, both modes in turn."""
    for seed in range(100 * block, 100 * block + 100):
        case, rng = random_case(seed + 10_000), np.random.default_rng(seed)
        run, num_own = Run(case), int(rng.integers(0, case.mask.total_seqlen_k + 1))
        own, received = ((FP32, case.dtype)[rng.integers(2)] for _ in "12")
        try:
            run.check(in_two(run, num_own, received, dtype=own, deterministic=bool(seed % 2)))
        except AssertionError as error:
            raise AssertionError(f"{case}, {num_own}: {case.mask.slices.tolist()}") from error


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(
    "mask", [masks.full(500, 1024), masks.causal(1024)], ids=["full", "causal"]
)
def test_one_buffer_gives_equal_bits(mask: AttnMask, widths: tuple[int, int]) -> None:
    """Of the same tiles: the sums of a key are made in the same order."""
    run = Run(Case("equal bits", mask, (2, 2), *widths))
    for num_own in (0, 256, 512, 896, 1024):
        for deterministic in (False, True):
            one = in_one(run, deterministic=deterministic)
            two = in_two(run, num_own, deterministic=deterministic)
            assert all(map(torch.equal, one[1:], two[1:])), num_own


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_split_groups_are_added_up_with_and_without_a_counter(
    head_dim: int, deterministic: bool
) -> None:
    """In the main kernel, so that they can be counted, or by the kernel behind it: equal bits."""
    from megatron_magi.core.kernel.hopper.choice import backward_launch
    from megatron_magi.core.kernel.hopper.launch import HeadsKey

    run = Run(Case("split", masks.causal(1000), heads=(64, 4), head_dim=head_dim))
    key = HeadsKey.of(run.call)
    params = backward_launch(run.call.table, key, deterministic, 700, TRAVEL).params
    assert params.num_splits > 1
    for received in (FP32, BF16):
        counted = in_two(run, 700, received, deterministic=deterministic)
        plain = in_two(run, 700, received, deterministic=deterministic, dtype=BF16)
        run.check(counted)
        run.check(plain)
        call = parted(run.call, 700)
        grad = run.grad._replace(deterministic=deterministic, received_dkv=places(call, received))
        assert all(map(torch.equal, launch(call, grad)[1:], counted[1:]))


def test_parts_of_sections_of_one_split_are_added_up() -> None:
    """Blocks of a key tile that share its head group are far apart in the launch, in an order of
    its own."""
    from megatron_magi.core.kernel.hopper.choice import backward_launch
    from megatron_magi.core.kernel.hopper.launch import HeadsKey

    cells = np.random.default_rng(0).random((32, 32)) < 0.2
    run, num_own = Run(Case("scattered", masks.from_block_mask(cells, 128), heads=(16, 1))), 1365
    params = backward_launch(run.call.table, HeadsKey.of(run.call), False, num_own, TRAVEL).params
    assert params.num_splits > params.lanes_per_section == 1 and params.order
    for received in (FP32, BF16):
        run.check(in_two(run, num_own, received))


def test_deterministic_runs_have_equal_bits() -> None:
    run = Run(Case("repeated", masks.causal(2000), heads=(8, 2)))
    first = in_two(run, 900, deterministic=True)
    for _ in range(5):
        assert all(map(torch.equal, first, in_two(run, 900, deterministic=True)))


def test_adds_to_dq_and_writes_nothing_beside_its_places() -> None:
    run = Run(Case("placed", masks.causal(1000)))
    total = torch.randn(1000, 4, 128, device="cuda")
    before, call = total.clone(), parted(run.call, 300)
    room = torch.full((700, 2, 304), 7.0, dtype=BF16, device="cuda")
    made = room[..., 8:136], room[..., 160:288]
    dq, dk, dv = launch(call, run.grad._replace(dq=total, received_dkv=made))
    assert dq is total
    run.check((dq - before, dk, dv))
    kept = torch.cat([room[..., :8], room[..., 136:160], room[..., 288:]], -1)
    assert (kept == 7).all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_may_arrive_late(widths: tuple[int, int], deterministic: bool) -> None:
    """20 ms after the launch, where NaN was before."""
    run = Run(Case("late", masks.causal(3000), (16, 2), *widths))
    call, flag, side = parted(run.call, 1100), word(-2), torch.cuda.Stream()
    assert call.received is not None
    rows = call.received.k._base
    assert rows is not None and rows.is_contiguous()
    sent = rows.cpu().pin_memory()
    rows.fill_(float("nan"))
    call = call._replace(received=call.received._replace(arrival=Arrival(flag.data_ptr(), 5)))
    grad = run.grad._replace(received_dkv=places(call, FP32), deterministic=deterministic)
    launch(call._replace(received=call.received._replace(arrival=None)), grad)  # warm
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_copying(20)
        rows.copy_(sent, non_blocking=True)
    on_stream("cuStreamWriteValue32", side, flag, 7)
    made = launch(call, grad)
    torch.cuda.synchronize()
    run.check(made)


def test_numbers_may_wrap() -> None:
    """A number just below 2^32 is reached by one just above 0."""
    run = Run(Case("wrap", masks.causal(600)))
    flag = word(3)
    call = parted(run.call, 200, Arrival(flag.data_ptr(), 2**32 - 5))
    run.check(launch(call, run.grad._replace(received_dkv=places(call, BF16))))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("heads", [(8, 8), (64, 4)], ids=["whole groups", "split groups"])
@pytest.mark.parametrize("received", [FP32, BF16], ids=["fp32", "bf16"])
def test_gradients_may_leave_early(
    received: torch.dtype, heads: tuple[int, int], deterministic: bool
) -> None:
    """What another stream copies behind the counter is what lies there in the end. Ten launches
    raise one counter, through 2^31."""
    from megatron_magi.core.kernel.hopper import HopperBackend

    run = Run(Case("early", masks.causal(2500), heads))
    call, side = parted(run.call, 1500), torch.cuda.Stream()
    count = HopperBackend.done_count(call, deterministic)
    assert count > 0
    start = 2**31 - 5 * count
    done = word(start)
    for turn in range(1, 11):
        made = places(call, received)
        rows = made[0]._base
        assert rows is not None
        taken = torch.zeros(rows.shape, dtype=received).pin_memory()
        torch.cuda.synchronize()
        grads = launch(
            call,
            run.grad._replace(received_dkv=made, done=done.data_ptr(), deterministic=deterministic),
        )
        on_stream("cuStreamWaitValue32", side, done, start + turn * count)
        with torch.cuda.stream(side):
            taken.copy_(rows, non_blocking=True)
        torch.cuda.synchronize()
        wide = rows.shape[-1] - 16
        assert torch.equal(taken[..., :wide], rows[..., :wide].cpu())
        run.check(grads)
    assert done.item() % 2**32 == (start + 10 * count) % 2**32
