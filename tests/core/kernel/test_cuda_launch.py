"""How kernels are launched: in graphs, on streams, in threads, during captures, on dirty memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_magi import flex_flash_attn_func, masks
from tests.core.kernel.cuda_bwd_cases import Case, docs
from tests.core.kernel.test_cuda_bwd import Run

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
MASKS = [masks.causal(300), docs(100, 65, 135), masks.full(300)]
Pass = tuple[Tensor, ...]


def attend(number: int, device: str = "cuda", **how: object) -> Pass:
    """out and its gradients in deterministic mode, with inputs of this number, on the current
    stream."""
    gen = torch.Generator(device).manual_seed(number)
    heads = (8, 2, 2, 8)
    *qkv, dout = (torch.randn(300, h, 128, generator=gen, device=device).bfloat16() for h in heads)
    qkv = [x.requires_grad_() for x in qkv]
    asked = {"deterministic": True, **how}
    out, _ = flex_flash_attn_func(*qkv, slices=MASKS[number % len(MASKS)], **asked)  # type: ignore[arg-type]
    return (out.detach(), *torch.autograd.grad(out, qkv, dout))


def same(got: Pass, wanted: Pass) -> bool:
    return all(map(torch.equal, got, wanted))


def dirty(megabytes: int) -> None:
    """Leave nan in the memory that is handed out next."""
    made = [torch.full((1 << 18,), torch.nan, device="cuda") for _ in range(megabytes)]
    made += [torch.full((megabytes << 18,), torch.nan, device="cuda") for _ in range(2)]
    made += [torch.full((1 << 12,), torch.nan, device="cuda") for _ in range(100)]
    torch.cuda.synchronize()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (34, 34)], ids=["by the kernel", "by the driver"])
def test_gradients_begin_at_zero_whatever_was_in_memory(
    heads: tuple[int, int], deterministic: bool
) -> None:
    """The sum of dq takes 0.7 MB and 18 MB."""
    run = Run(Case("dirty", masks.causal(1030), heads))
    grad = run.grad._replace(deterministic=deterministic)
    for _ in range(3):
        dirty(64)
        run.check(run_backward(run, grad))


def run_backward(run: Run, grad: object) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_magi.core.kernel.hopper import backward

    return backward(run.call, grad)  # type: ignore[arg-type]


def test_streams_in_turn_give_the_bits_of_one_stream() -> None:
    """Each call has other inputs, and none waits for the one before."""
    wanted = [attend(number) for number in range(12)]
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(5)]
    torch.cuda.synchronize()
    got = []
    for number in range(12):
        with torch.cuda.stream(streams[number % 5]):
            got.append(attend(number))
    torch.cuda.synchronize()
    assert all(map(same, got, wanted))


def test_launches_in_a_row_have_parameters_of_their_own() -> None:
    """Also while the device is far behind the host."""
    wanted = [attend(number) for number in range(6)]
    torch.cuda._sleep(100_000_000)
    got = [attend(number % 6) for number in range(60)]
    assert all(same(x, wanted[number % 6]) for number, x in enumerate(got))


def in_threads(work: Callable[[int], None], count: int) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_threads_launch_at_the_same_time() -> None:
    """On one stream, and on streams of their own."""
    wanted = [attend(number) for number in range(4)]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if number % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                got = attend(number)
                stream.synchronize()
                assert same(got, wanted[number])

    in_threads(work, 4)


def test_more_kinds_of_launches_than_graphs_are_kept() -> None:
    """Kernels of five widths, two dtypes, two modes and two caps on two streams."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    runs = [
        Run(Case("kinds", masks.causal(130), (2, 2), *widths, dtype=dtype, softcap=cap))
        for widths in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        for dtype in (torch.bfloat16, torch.float16)
        for cap in (0.0, 20.0)
    ]
    torch.cuda.synchronize()
    for _, stream, fixed, run in itertools.product(range(2), streams, (False, True), runs):
        with torch.cuda.stream(stream):
            grads = run_backward(run, run.grad._replace(deterministic=fixed))
        stream.synchronize()
        run.check(grads)


def test_a_first_launch_of_a_stream_leaves_the_capture_of_another_thread_alone() -> None:
    """What makes a graph is forbidden meanwhile, and would end the capture."""
    run = Run(Case("capture", masks.causal(200), (2, 2)))
    run_backward(run, run.grad)  # uploads the tables
    stream, graph = torch.cuda.Stream(priority=-3), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        room = [torch.empty(1 << 18, device="cuda") for _ in range(20)]
    x = torch.zeros(4, device="cuda")
    del room[::2]  # the driver gives no memory meanwhile, and takes back what is free as a whole
    torch.cuda.synchronize()
    begun, done = threading.Event(), threading.Event()
    made: list[Pass] = []

    def work(number: int) -> None:
        if number == 0:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                x.add_(1)
                begun.set()
                assert done.wait(60)
            return
        assert begun.wait(60)
        try:
            with torch.cuda.stream(stream):
                made.append(run_backward(run, run.grad))
        finally:
            done.set()

    in_threads(work, 2)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1] * 4
    run.check(made[0])  # type: ignore[arg-type]


@pytest.mark.multi_gpu
def test_devices_in_turn_give_the_bits_of_one() -> None:
    """Every device is told of a kernel's shared memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = ([attend(0, f"cuda:{i}") for _ in range(2)] for i in range(2))
    for got in (*first, *second):
        assert same(tuple(x.cpu() for x in got), tuple(x.cpu() for x in attend(0, "cuda:0")))
