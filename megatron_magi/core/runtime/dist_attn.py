"""Distributed attention: a loop over stages in the forward, and one in the backward.

The keys and values of stage i + 1 are sent while stage i computes. A stage of the forward attends
and, if rows attend in several stages, merges (out, lse); own keys come first. A stage of the
backward (staged_backward.py) adds to dq, and its dk and dv return to their owners while the next
stage computes. The backward takes own keys last, so that a computation also hides the return of the
last gradients. Only the clearing of dq and, unless lse or sinks have gradients, delta overlap with
its first fetch. The backward fetches keys and values again, so that memory does not grow with the
number of ranks; with ``MagiConfig.keep_received_keys`` it reads those that the forward has received
(saved_kv.py).

T local tokens, S rows of a stage's key buffer, H query heads, G key/value heads, D head_dim of
queries and keys, E of values (another one in multi-latent attention).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.checks import instance
from megatron_magi.core.comm.process_group import CpGroup, group_rank, resolve_group
from megatron_magi.core.comm.rows import head_start
from megatron_magi.core.comm.transport_choice import transport_for
from megatron_magi.core.kernel.attention import no_logits
from megatron_magi.core.kernel.autograd import (
    apply_without_functorch,
    differentiable_once,
    one_graph_break,
    refuse_tangents,
    refuse_transforms,
    unwrap_dead_functorch,
)
from megatron_magi.core.kernel.backend import AttnCall, Pair, acc_dtype, subtract_dlse
from megatron_magi.core.kernel.call_key import PreparedCalls, call_key
from megatron_magi.core.kernel.head_dims import widths_of
from megatron_magi.core.kernel.qkv_checks import check_qkv
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.kernel.sink import sink_lse_of
from megatron_magi.core.kernel.sink_gradient import sink_gradient
from megatron_magi.core.kernel.softmax import PLAIN_SOFTMAX, Softmax
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.agreement.comparison import compare
from megatron_magi.core.runtime.agreement.signature import Call
from megatron_magi.core.runtime.prepared import cached_on, prepared_for
from megatron_magi.core.runtime.saved_kv import SavedKV
from megatron_magi.core.runtime.sent_queries import SentQueries
from megatron_magi.core.runtime.stage_context import KVPrefetcher, OutGrads, Qkv, StageContext
from megatron_magi.core.runtime.staged_backward import staged_backward
from megatron_magi.core.runtime.token_dispatch import check_group


@one_graph_break
def dist_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    cp_group: CpGroup,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> tuple[Tensor, Tensor]:
    """Attention of the dispatched sequence; out and lse are differentiable in q, k, v and sinks.

    Args:
        q: [T, H, D], this rank's tokens in local order.
        k: [T, G, D]; in cross-attention this rank's keys, [plan.key_layout.num_local_tokens, G, D].
        v: as k, [T, G, E]; E may differ from D (multi-latent attention).
        plan: the plan that dispatched them, or one with another mask on the same layout.
        cp_group: the context-parallel group, a 1-D or 2-D mesh, or None for one rank.
        softmax: scale, softcap and sinks. Sinks are [s, H], the same on every rank, or
            [T, s, H] of this rank's tokens. The gradient of the former is this rank's share: sum
            it over the group, as with any replicated parameter whose tokens are spread.

    Returns:
        out: [T, H, E] in q's dtype, 0 where a token sees nothing.
        lse: [T, H] natural log, fp32 (fp64 for fp64 inputs), sinks included; -inf where a token
            sees nothing and there are no sinks.

    Raises:
        ValueError, TypeError: tensors or a group that do not fit the plan.
        AgreementError: ranks that have different plans, or differ in heads, dtype, scale, softcap,
            in whether there are sinks, for all tokens or per token, or in whether a gradient will
            be asked for.
        NotImplementedError: inputs with forward-mode tangents, or a call inside of a transform of
            torch.func.
        RuntimeError: in backward, a second derivative.

    Cost: forward receives each key/value row that this rank needs once; backward receives them
    again, unless the forward has kept them, and returns their gradients. The host does not wait for
    the device. Under torch.compile, the call is one graph break. After a first forward and backward
    with the plan, a CUDA graph may hold both, of several ranks with the transport "all_to_all".
    Ranks compare the calls that are captured, and must then replay the same graphs in one order.
    On torch's device "meta", shapes, dtypes and strides come out, forward and backward.
    """
    return _attend(Qkv(q, k, v), plan, cp_group, softmax)


@one_graph_break
def dist_attn_and_max_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    cp_group: CpGroup,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dist_attn``, and each head's largest visible logit over the whole sequence.

    Returns:
        out, lse: as from ``dist_attn``.
        max_logits: [H] in the dtype of lse, the same on every rank, not differentiable; -inf if
            nothing is visible. Sinks do not count. The kernels "cuda" and "reference" find it.

    Raises:
        NotImplementedError: the kernels "flex" and "fa4".
        the rest: as ``dist_attn``.

    Cost: that of ``dist_attn``, and an all-reduce of H numbers.
    """
    check_qkv(q, k, v)
    most = no_logits(q)
    out, lse = _attend(Qkv(q, k, v), plan, cp_group, softmax, most)
    group = resolve_group(cp_group)
    if group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return out, lse, most


def _attend(
    qkv: Qkv,
    plan: AttnPlan,
    cp_group: CpGroup,
    softmax: Softmax,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dist_attn``; sets ``max_logits`` to the larger of itself and this rank's largest logits."""
    q, k, v = qkv
    refuse_transforms()
    check_group(plan, cp_group)
    _check_local(q, k, v, plan)
    _refuse_capture(q, plan)
    instance(softmax, Softmax, "softmax", "make one, e.g. Softmax(scale=0.1)")
    numbers, sink_lse = softmax.numbers(q), sink_lse_of(softmax.sink, q)
    inputs = qkv if sink_lse is None else (*qkv, sink_lse)
    refuse_tangents(*inputs)
    kind = "dist_attn" if max_logits is None else "dist_attn_and_max_logits"
    comparison = compare(_call(kind, qkv, sink_lse, *numbers), plan, cp_group, q.device)
    config = plan.config
    group = resolve_group(cp_group)
    ready = prepared_for(plan, group_rank(cp_group), q.device)
    backend = select_backend(config.kernel_backend, q.device, q.dtype, widths_of(q, v))
    comparison.wait()  # late, so that the preparation above overlaps with the comparison
    work = StageContext(
        plan,
        ready,
        group,
        transport_for(plan, group, q),
        backend,
        *numbers,
        acc_dtype(q.dtype) if config.dkv_reduce_in_fp32 else q.dtype,
        max_logits,
        config.keep_received_keys and will_backward(inputs),
    )
    sinks = None if sink_lse is None else unwrap_dead_functorch(sink_lse)
    out, lse = _apply(
        unwrap_dead_functorch(q), unwrap_dead_functorch(k), unwrap_dead_functorch(v), sinks, work
    )
    return out, lse


def _call(kind: str, qkv: Qkv, sink_lse: Tensor | None, scale: float, softcap: float) -> Call:
    """The facts of a call that must be equal on every rank.

    Ranks with a backward would wait for one without, so the facts say if a gradient will be asked
    for. They say if sinks are for all tokens or per token, and not their values.
    """
    _, k, v = qkv
    needs = will_backward(qkv if sink_lse is None else (*qkv, sink_lse))
    extra = int(needs) | (0 if sink_lse is None else sink_lse.ndim << 1)
    return Call(kind, (*k.shape[1:], v.shape[2]), k.dtype, scale, extra, softcap)


def will_backward(inputs: tuple[Tensor, ...]) -> bool:
    """True if a gradient may be asked for."""
    return torch.is_grad_enabled() and True in [x.requires_grad for x in inputs]


class _DistAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None, work: StageContext
    ) -> tuple[Tensor, Tensor]:
        so_far: Pair | None = None
        # A row with one stage is written in the final dtype directly; several stages accumulate.
        merges, queries = work.ready.merges, work.ready.queries
        dtype = acc_dtype(q.dtype) if merges or queries else q.dtype
        sent = None if queries is None else SentQueries(work, queries, q)
        returning = None
        feed = KVPrefetcher(work, work.ready.forward, k, v)
        for stage, keys, values in feed:
            if so_far is None or stage.sees:
                if feed.in_flight is not None and work.transport.uses_sms:
                    head_start(q.device)
                numbers = work.softmax_scale, work.max_logits, work.softcap
                # Sinks join a row once: in the first result of several that merge, or where the
                # one stage that writes the row computes it.
                sinks = sink_lse if so_far is None or not merges else None
                call = AttnCall(q, keys, values, stage.table, *numbers, sink_lse=sinks)
                given = {"prev" if merges else "into": so_far}
                so_far = work.backend.forward(call, out_dtype=dtype, **given)
                del call
            del keys, values
            if sent is not None and returning is None:  # while keys of the next stage arrive
                returning = sent.attend(k, v)
        assert so_far is not None, "a plan has at least one stage"
        if sent is not None and returning is not None:
            sent.merge(returning, so_far)
        out, lse = so_far[0].to(q.dtype), so_far[1]
        ctx.save_for_backward(q, k, v, sink_lse, out, lse, *feed.buffers)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink_lse, out, lse, *buffers = ctx.saved_tensors
        sink_lse = sink_lse if ctx.needs_input_grad[3] else None
        work: StageContext = ctx.work
        # Chosen again: a transport that has run out of memory since then is no longer there.
        work = work._replace(transport=transport_for(work.plan, work.group, q))
        scale, softcap = work.softmax_scale, work.softcap
        call = Call("backward of dist_attn", k.shape[1:], k.dtype, scale, softcap=softcap)
        compare(call, work.plan, work.group, q.device).wait()
        dout = torch.zeros_like(out) if dout is None else dout
        delta = None  # left to staged_backward, unless lse or sinks have gradients
        if dlse is not None or sink_lse is not None:
            delta = subtract_dlse(work.backend.delta(out, dout, lse.dtype), dlse)
        kept = SavedKV(buffers, k, v) if work.keeps else None
        grads = staged_backward(work, Qkv(q, k, v), (out, lse), OutGrads(dout, delta), kept)
        return *grads, None if delta is None else sink_gradient(sink_lse, lse, delta), None


_apply = apply_without_functorch(_DistAttn)


def _refuse_capture(q: Tensor, plan: AttnPlan) -> None:
    """Refuse a CUDA graph with exchanges by copy engines, which have a number each."""
    transport = plan.config.transport
    if plan.cp_size == 1 or transport == "all_to_all" or not q.is_cuda:
        return
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"dist_attn of {plan.cp_size} ranks requires transport 'all_to_all' to be captured "
            f"into a CUDA graph, got {transport!r}; set MagiConfig.transport, or leave attention "
            f"out of the graph"
        )


def _check_local(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan) -> None:
    """Check each key of call once, because the layers and microbatches of a plan are alike."""
    if not type(q) is type(k) is type(v) is Tensor:
        return _check(q, k, v, plan)
    key = call_key(q, k, v)
    accepted: PreparedCalls = cached_on(plan, "accepted calls", PreparedCalls)
    if key not in accepted:
        _check(q, k, v, plan)
        accepted.keep(key, True)


def _check(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan) -> None:
    check_qkv(q, k, v)
    queries, keys = (layout.num_local_tokens for layout in plan.homes)
    for name, x, tokens in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        if len(x) != tokens:
            raise ValueError(
                f"{name} must hold this rank's {tokens} tokens, got {len(x)}; "
                f"dispatch the sequence with this plan first"
            )
    shape = plan.head_shape
    planned = (shape.num_heads_q, shape.num_heads_kv, shape.head_dim, shape.value_dim)
    if (q.shape[1], *k.shape[1:], v.shape[2]) != planned:
        raise ValueError(
            f"q, k and v must have the heads that were planned, {shape} (query heads/key heads x "
            f"head_dim), got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; plan with "
            f"the HeadShape of one tensor-parallel rank"
        )
