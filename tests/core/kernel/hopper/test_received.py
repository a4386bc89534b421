"""A backward over own and received keys, on a stand-in that computes it from the structs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_magi.core.kernel.backend import Arrival, AttnCall, GradCall, Pair, Received
from megatron_magi.core.kernel.hopper import HopperBackend, backward
from megatron_magi.core.kernel.hopper.choice import backward_launch
from megatron_magi.core.kernel.hopper.forward import forward
from megatron_magi.core.kernel.hopper.launch import HeadsKey
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.torch_flex import FlexBackend
from megatron_magi.core.kernel.widths import COMPILED_WIDTHS, Widths
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, FP32, NAMED, case, exact


def word(number: int = 0) -> Tensor:
    """32 bits in memory; the stand-in takes host addresses."""
    return torch.tensor([number], dtype=torch.int32)


def parted(call: AttnCall, num_own: int, arrival: Arrival | None = None) -> AttnCall:
    """The same keys in two buffers."""
    parts = [(x[:num_own].clone(), x[num_own:].clone()) for x in (call.k, call.v)]
    (k, k2), (v, v2) = parts
    return call._replace(k=k, v=v, received=Received(k2, v2, arrival))


def places(call: AttnCall, dtype: torch.dtype) -> Pair:
    """Room for the gradients of received keys, side by side as they travel."""
    assert call.received is not None
    k, v = call.received[:2]
    wide = torch.full((*k.shape[:2], k.shape[2] + v.shape[2]), 7.0, dtype=dtype)
    dk, dv = wide.split((k.shape[2], v.shape[2]), -1)
    return dk, dv


def gradients(name: str, call: AttnCall, dout: Tensor) -> tuple[GradCall, tuple[Tensor, ...]]:
    """What a backward takes besides the call, and the gradients by the reference."""
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(NAMED[name].to_dense()))
    out, lse = ReferenceBackend().forward(exact(call))
    want = ReferenceBackend().backward(exact(call), GradCall(dout.double(), lse, out=out))
    return GradCall(dout, lse.float(), (out * dout.double()).sum(-1).float()), want


@pytest.mark.parametrize("name, num_own", [("causal", 0), ("causal", 70), ("causal", 200),
                                           ("packed", 1), ("window", 150),
                                           ("rows that see nothing", 55)])  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_gradients_of_both(
    name: str,
    num_own: int,
    deterministic: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    widths: tuple[int, int],
    library: abi_on_cpu.CpuLibrary,
) -> None:
    call, dout = case(NAMED[name], widths=widths)
    grad, want = gradients(name, call, dout)
    flag, done = word(-3), word(2**31 - 1)
    both = parted(call, num_own, Arrival(flag.data_ptr(), 2**32 - 4))
    made = places(both, dtypes[1])
    asked = grad._replace(
        dtype=dtypes[0], deterministic=deterministic, received_dkv=made, done=done.data_ptr()
    )
    dq, dk, dv = backward(both, asked)
    assert dk.dtype == dv.dtype == dtypes[0] and len(dk) == len(dv) == num_own
    for own, received, x in zip((dk, dv), made, want[1:], strict=True):
        got = torch.cat([own.double(), received.double()])
        torch.testing.assert_close(got, x, atol=3e-2, rtol=2e-2)
    torch.testing.assert_close(dq.double(), want[0], atol=3e-2, rtol=2e-2)
    count = HopperBackend.done_count(both, deterministic)
    assert done.item() == (2**31 - 1 + count + 2**31) % 2**32 - 2**31
    tile = 64 if widths[0] > 192 else 128
    assert count >= 2 * -(-(len(call.k) - num_own) // tile) and count % 2 == 0
    assert (count == 0) == (num_own == len(call.k))


def test_a_launch_is_kept_for_each_boundary(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["causal"])
    key = HeadsKey.of(call)
    whole, parts = (backward_launch(call.table, key, False, own) for own in (None, 100))
    assert whole is backward_launch(call.table, key, False, 200) and parts is not whole
    assert (whole.done_count, parts.done_count) == (0, 2)
    assert "1 of them of received keys" in str(parts)


def test_counters_of_split_groups_have_room(library: abi_on_cpu.CpuLibrary) -> None:
    """Behind those of deterministic mode, and in front of dq's sum."""
    call, _ = case(NAMED["causal"], heads=(16, 2))
    key = HeadsKey.of(call)
    for deterministic in (False, True):
        launch = backward_launch(call.table, key, deterministic, 100)
        assert launch.params.num_splits > 1
        params = launch.params
        counters = params.num_items * 2
        counters += 1 + 2 * 16 * params.num_row_groups if deterministic else 0
        assert launch.scratch_at[3] - launch.scratch_at[2] == -(-4 * counters // 128) * 128


def test_no_queries(library: abi_on_cpu.CpuLibrary) -> None:
    """Nothing is launched, nothing counted, and gradients are zero."""
    call, dout = case(dataclasses.replace(NAMED["nothing"], total_seqlen_q=0))
    both = parted(call, 10)
    made = places(both, FP32)
    backward(both, GradCall(dout, torch.zeros(0, 4), torch.zeros(0, 4), received_dkv=made))
    assert library.calls == [] and not made[0].any() and not made[1].any()
    assert HopperBackend.done_count(both, False) == 0


@pytest.mark.parametrize(
    "widths, takes",
    [*((x, True) for x in COMPILED_WIDTHS), (Widths(80, 80), False), (Widths(320, 64), False)],
)
def test_heads_that_are_padded_take_none(widths: Widths, takes: bool) -> None:
    assert HopperBackend.takes_received(widths) == takes  # type: ignore[arg-type]
    assert not ReferenceBackend().takes_received(widths)
    assert not FlexBackend().takes_received(widths)


def test_calls_without_a_kernel_are_refused(library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(NAMED["causal"])
    both, grad = parted(call, 100), GradCall(dout, torch.zeros(200, 4), torch.zeros(200, 4))
    narrow, narrow_dout = case(NAMED["causal"], widths=(80, 80))
    for run in (
        lambda: forward(both),
        lambda: backward(parted(narrow, 100), grad._replace(dout=narrow_dout)),
        lambda: ReferenceBackend().forward(both),
        lambda: ReferenceBackend().backward(both, grad),
        lambda: FlexBackend().forward(both),
        lambda: FlexBackend().backward(both, grad),
    ):
        with pytest.raises(NotImplementedError, match="takes all keys in one tensor, got received"):
            run()
    assert library.calls == []


def test_what_does_not_fit_is_refused(library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(NAMED["causal"])
    both = parted(call, 100)
    made = places(both, BF16)
    grad = GradCall(dout, torch.zeros(200, 4), torch.zeros(200, 4))
    assert both.received is not None
    k2, v2 = both.received[:2]
    for wrong, message in (
        (Received(k2[:-1], v2[:-1]), "lengths the slices were made for"),
        (Received(k2, v2[:-1]), "received v must be .* receive the rows into such a tensor"),
        (Received(k2.float(), v2), "received k must be torch.bfloat16"),
        (Received(k2, v2.mT.contiguous().mT), "received v must be .*16-byte aligned rows"),
    ):
        with pytest.raises(ValueError, match=message):
            backward(both._replace(received=wrong), grad._replace(received_dkv=made))
    for dkv, message in (
        (None, "must be given together, got received keys and no places"),
        ((made[0], made[1].float()), "received dv must be written to torch.bfloat16"),
        ((made[0].half(), made[1].half()), "received dk must be written to torch.bfloat16"),
        ((made[0][:-1], made[1]), "received dk must be written to"),
    ):
        with pytest.raises(ValueError, match=message):
            backward(both, grad._replace(received_dkv=dkv))
    with pytest.raises(ValueError, match="must be given together, got no keys and places"):
        backward(call, grad._replace(received_dkv=made))
    assert library.calls == []


def test_a_repeated_call_has_words_and_places_of_its_own(library: abi_on_cpu.CpuLibrary) -> None:
    whole, dout = case(NAMED["causal"])
    grad, want = gradients("causal", whole, dout)
    for turn in range(4):
        there, done = word(turn + 5), word(100 * turn)
        call = parted(whole, 70, Arrival(there.data_ptr(), turn + 5))
        received = places(call, (BF16, FP32)[turn % 2])
        asked = grad._replace(received_dkv=received, done=done.data_ptr())
        dq, *own = backward(call, asked)
        assert int(done) == 100 * turn + HopperBackend.done_count(call, False)
        torch.testing.assert_close(dq.double(), want[0], atol=3e-2, rtol=2e-2)
        for parts, x in zip(zip(own, received, strict=True), want[1:], strict=True):
            got = torch.cat([part.double() for part in parts])
            torch.testing.assert_close(got, x, atol=3e-2, rtol=2e-2)
