"""Ours, FlexAttention and the list of all implementations that the kernel benchmark knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.kernel.cudnn import Cudnn, is_dense, sdpa
from benchmarks.lib.cell import Call, Case, Direction, Inputs, Peer, autograd_call
from benchmarks.lib.flash import Ffa, Flash3, Flash4
from megatron_magi import flex_flash_attn_func
from megatron_magi.config import KernelBackend
from megatron_magi.core.kernel import flash4
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.head_dims import widths_of
from megatron_magi.core.kernel.select import select_backend


class Ours:
    """flex_flash_attn_func with a mask that it has seen."""

    def __init__(self, backend: KernelBackend = "cuda") -> None:
        self.backend: KernelBackend = backend

    def missing(self) -> str | None:
        lacks = self.backend == "fa4" and not flash4.is_installed()
        return "no package flash-attn-4" if lacks else None

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return None

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        attend = functools.partial(
            flex_flash_attn_func, slices=case.mask, backend=self.backend,
            softcap=case.softcap, deterministic=case.deterministic,
        )  # fmt: skip
        return autograd_call(lambda q, k, v: attend(q, k, v)[0], direction, x)

    def below_autograd(self, case: Case, direction: Direction, x: Inputs) -> Call:
        """The backend's own functions, with what they need made before."""
        kernel = select_backend(self.backend, x.q.device, x.q.dtype, widths_of(x.q, x.v))
        scale, cap = x.q.shape[-1] ** -0.5, case.softcap
        asked = AttnCall(x.q, x.k, x.v, case.table, scale, softcap=cap)
        if direction == "fwd":
            return lambda: kernel.forward(asked)[:1]
        out, lse = kernel.forward(asked)

        def backward() -> tuple[Tensor, ...]:
            how = {"dtype": x.q.dtype, "deterministic": case.deterministic}
            return kernel.backward(asked, GradCall(x.dout, lse, out=out, **how))

        return backward


class Flex:
    """FlexAttention, compiled once per mask and length; its block mask is made from our slices."""

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return "it has no deterministic mode to ask for" if case.deterministic else None

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        from megatron_magi.core.kernel.flex_block_mask import block_mask

        compiled = _compiled_flex(case)
        blocks, cap = block_mask(case.table, x.q.device), _cap(case.softcap)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            views = (t.transpose(0, 1)[None] for t in (q, k, v))
            out = compiled(*views, score_mod=cap, block_mask=blocks, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1)

        return autograd_call(attend, direction, x)


class Flash2:
    """FlashAttention-2, which PyTorch has behind SDPA: what runs on GPUs before Hopper."""

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case, direction: Direction) -> str | None:
        if case.documents is None or not is_dense(case.documents):
            return "SDPA has neither documents nor windows"
        return (
            "no softcap and no deterministic mode" if case.softcap or case.deterministic else None
        )

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        assert case.documents is not None
        attend = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION, case.documents.causal)
        return autograd_call(attend, direction, x)


def _cap(softcap: float) -> Callable[..., Tensor] | None:
    """A score_mod of FlexAttention; None: scores stay as they are."""
    if not softcap:
        return None

    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.lru_cache(maxsize=1)
def _compiled_flex(case: Case) -> Any:
    """Starts afresh with each case: past its limit of recompilations dynamo would run it eagerly,
    with all scores in memory."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # Backward runs several times on one forward, so its saved tensors must not be given away.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def all_peers() -> dict[str, Peer]:
    """By the name of their column."""
    return {
        "ours": Ours(),
        "ours_fa4": Ours("fa4"),
        "ours_flex": Ours("flex"),
        "cudnn": Cudnn(),
        "flex": Flex(),
        "fa2": Flash2(),
        "fa3": Flash3(),
        "fa4": Flash4(),
        "ffa": Ffa(),
    }
