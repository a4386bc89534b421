"""Splitting the QKV projection, RoPE and the copies: one kernel forward and one backward.

Megatron's local path splits the projection into views and rotates q and k by six elementwise
kernels each; the attention then copies q, k and v to make them contiguous. Our kernel reads the
projection once and writes the three contiguous results. Angles stay fp32, while the local path
rounds their sine and cosine to the activations' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_magi.core.kernel.autograd import differentiable_once

ROWS = 8
"""Number of rows that a program handles, for one key/value group."""

PLAIN = ("qk_layernorm", "rotary_interleaved", "attention_output_gate")
"""Fields of the configuration that add something between projection and RoPE."""

QKV = tuple[Tensor, Tensor, Tensor]


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention, with RoPE applied while the projection is split.

    The parameters are the same. It takes rotary angles of whole heads (rotary_percent 1, not
    interleaved), without q and k norms, output gates or inference; `check_fits` refuses the rest.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check_fits(config)
        super().__init__(config, *args, **kwargs)
        self._angles: Tensor | None = None

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        """Megatron's forward, but the angles are kept for the split instead of its own RoPE.

        Raises:
            NotImplementedError: a packed batch of Megatron's, whose positions begin anew in each
                sequence; those of `MagiPackedSeqParams` are in the angles.
        """
        if getattr(kwargs.get("packed_seq_params"), "qkv_format", None) == "thd":
            raise NotImplementedError(
                "the fused QKV split and RoPE requires packed_seq_params of make_packed_seq_params "
                "or from_packed_seq_params, got qkv_format 'thd'; set model.fused=off"
            )
        self._angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        try:
            return super().forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> QKV:
        """query [rows, batch, heads, head_dim], key and value [rows, batch, kv heads, head_dim]."""
        mixed, _ = self.linear_qkv(hidden_states)
        assert self._angles is not None, "a decoder with rotary positions passes their angles"
        return split_and_rotate(
            mixed, self._angles, self.num_query_groups_per_partition, self.key_hidden_size
        )


def check_fits(config: Any) -> None:
    """Raise NotImplementedError for an attention that does more between projection and RoPE."""
    wanted: dict[str, Any] = dict.fromkeys(PLAIN, False)
    wanted["yarn_rotary_scaling_factor"] = None  # YaRN scales what it rotates
    other = {n: v for n, want in wanted.items() if (v := getattr(config, n, want)) != want}
    if config.num_query_groups % config.tensor_model_parallel_size:
        other["num_query_groups"] = config.num_query_groups
    if any(getattr(config, "no_rope_freq", None) or ()):
        other["no_rope_freq"] = config.no_rope_freq
    if other:
        raise NotImplementedError(
            f"the fused QKV split and RoPE requires {wanted} and num_query_groups divisible by the "
            f"tensor-parallel size, and rotary positions in all layers, got {other}; set "
            f"model.fused=off"
        )


def split_and_rotate(mixed: Tensor, angles: Tensor, groups: int, head_dim: int) -> QKV:
    """Query, key and value of a mixed projection, with queries and keys rotated.

    Args:
        mixed: [rows, batch, groups * (heads per group + 2) * head_dim]: for each group its queries,
            its key and its value.
        angles: float32 [rows, 1, 1, head_dim], both halves equal (Megatron's RotaryEmbedding).

    Raises:
        ValueError: angles of another shape, such as others for each sequence of a batch.
    """
    if angles.shape != (mixed.shape[0], 1, 1, head_dim):
        raise ValueError(
            f"rotary angles must be [{mixed.shape[0]}, 1, 1, {head_dim}], one for each row and "
            f"channel of a head, got {tuple(angles.shape)}; rotary_percent must be 1, and the "
            f"sequences of a batch share their positions"
        )
    q, k, v = _SplitAndRotate.apply(mixed, angles, groups, head_dim)
    return q, k, v


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor, groups: int, head_dim: int) -> QKV:
        rows, batch, width = mixed.shape
        heads = width // head_dim - 2 * groups
        mixed, angles = mixed.contiguous(), angles.float().contiguous()
        q = mixed.new_empty(rows, batch, heads, head_dim)
        k, v = (mixed.new_empty(rows, batch, groups, head_dim) for _ in range(2))
        ctx.save_for_backward(angles)
        ctx.groups = groups
        _launch(mixed, angles, (q, k, v), is_backward=False)
        return q, k, v

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (angles,) = ctx.saved_tensors
        dq, dk, dv = (g.contiguous() for g in grads)
        rows, batch, heads, head_dim = dq.shape
        mixed = dq.new_empty(rows, batch, (heads + 2 * ctx.groups) * head_dim)
        _launch(mixed, angles, (dq, dk, dv), is_backward=True)
        return mixed, None, None, None


def _launch(mixed: Tensor, angles: Tensor, qkv: QKV, is_backward: bool) -> None:
    q, k, v = qkv
    rows, batch, heads, head_dim = q.shape
    groups = k.shape[2]
    half = head_dim // 2
    _rotate[(triton.cdiv(rows * batch, ROWS), groups)](
        mixed,
        angles,
        q,
        k,
        v,
        rows * batch,
        batch,
        groups,
        heads // groups,
        triton.next_power_of_2(heads // groups),
        half,
        triton.next_power_of_2(half),
        ROWS,
        is_backward,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    mixed,
    angles,
    q,
    k,
    v,
    num_rows,
    batch,
    groups,
    per_group: tl.constexpr,
    heads_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    rows: tl.constexpr,
    is_backward: tl.constexpr,
):
    """mixed -> q, k, v, or back with negated angles. Each program handles `rows` x one group.

    It loads all heads before it stores one, so that the loads do not wait for each other.
    """
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)[:, None, None]
    head = tl.arange(0, heads_block)[None, :, None]
    channel = tl.arange(0, half_block)[None, None, :]
    inside = (row < num_rows) & (channel < half)
    is_query = inside & (head < per_group)
    angle = tl.load(angles + (row // batch) * 2 * half + channel, mask=inside, other=0.0)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    if is_backward:
        sin = -sin
    of_group = row * groups + tl.program_id(1)
    mixed_q = mixed + (of_group * (per_group + 2) + head) * 2 * half + channel
    mixed_k = mixed + (of_group * (per_group + 2) + per_group) * 2 * half + channel
    mixed_v = mixed_k + 2 * half
    own_q = q + (of_group * per_group + head) * 2 * half + channel
    own_k = k + of_group * 2 * half + channel
    own_v = v + of_group * 2 * half + channel
    from_q, to_q = (own_q, mixed_q) if is_backward else (mixed_q, own_q)
    from_k, to_k = (own_k, mixed_k) if is_backward else (mixed_k, own_k)
    from_v, to_v = (own_v, mixed_v) if is_backward else (mixed_v, own_v)
    q_low = tl.load(from_q, mask=is_query, other=0.0)
    q_high = tl.load(from_q + half, mask=is_query, other=0.0)
    k_low = tl.load(from_k, mask=inside, other=0.0)
    k_high = tl.load(from_k + half, mask=inside, other=0.0)
    v_low = tl.load(from_v, mask=inside, other=0.0)
    v_high = tl.load(from_v + half, mask=inside, other=0.0)
    _store_rotated(to_q, q_low, q_high, cos, sin, half, is_query)
    _store_rotated(to_k, k_low, k_high, cos, sin, half, inside)
    tl.store(to_v, v_low, mask=inside)
    tl.store(to_v + half, v_high, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rotated(to, low, high, cos, sin, half: tl.constexpr, inside):  # type: ignore[no-untyped-def]
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    tl.store(to, low * cos - high * sin, mask=inside)
    tl.store(to + half, high * cos + low * sin, mask=inside)
