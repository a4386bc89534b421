"""From document boundaries to a mask, a plan and the parameter object Megatron carries along.

Megatron hands one `packed_seq_params` object unchanged through model, block (also when layers are
recomputed), layer and attention to the core attention. `MagiPackedSeqParams` is such an object with
our plans in it. Its format is 'sbhd' although the tokens are packed: then Megatron takes its plain
per-token path (no THD special cases in attention or RoPE) and everything about documents is in the
plan's mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_magi.config import MagiConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_magi.core.mask.mask import AttnMask
    from megatron_magi.core.plan.attn_plan import AttnPlan

MaskKind = Literal["causal", "full"]
"""Inside one document: "causal" (a token sees itself and what is before) or "full" (all of it)."""


@dataclass
class MagiPackedSeqParams(PackedSeqParams):
    """One microbatch's attention plans and RoPE positions, in Megatron's clothes.

    Stock fields set: qkv_format 'sbhd', max_seqlen_q/kv (padded global length), cp_group.
    """

    plan: AttnPlan | None = None
    """Plan of the layers without a sliding window; None when every layer has one."""

    window_plan: AttnPlan | None = None
    """Plan of the sliding-window layers on the same dispatch; None when no layer has a window."""

    rope_positions: Tensor | None = None
    """int64 [num_local_tokens], the RoPE position of each local row."""

    @property
    def dispatch_plan(self) -> AttnPlan:
        """The plan that tokens are dispatched by (both plans share one dispatch)."""
        raise NotImplementedError


def make_packed_seq_params(
    cu_seqlens: Sequence[int] | np.ndarray | Tensor,
    model_config: TransformerConfig,
    cp_group: Any,
    *,
    magi_config: MagiConfig | None = None,
    mask_kind: MaskKind = "causal",
    mask: AttnMask | None = None,
    restart_positions: bool = True,
    device: torch.device | str | None = None,
) -> MagiPackedSeqParams:
    """Plan one microbatch; a pure function, called alike on every pipeline stage and CP rank.

    Args:
        cu_seqlens: [num_docs + 1] prefix sums of document lengths in tokens, first 0; the last is
            the length of the packed stream. Host data; a CUDA tensor costs a synchronisation.
        model_config: heads, head dim, TP size, sequence parallelism, window_size are read from it.
        cp_group: Context-parallel ProcessGroup or 1-D DeviceMesh; None means size 1.
        magi_config: Planner and kernel knobs; default `MagiConfig()`.
        mask_kind: Visibility inside a document. `model_config.window_size` narrows it in the
            layers Megatron calls window layers (window_attn_skip_freq).
        mask: Any other mask over the stream, instead of mask_kind; windows are then refused.
        restart_positions: RoPE positions start at 0 in every document; False: stream positions.
        device: Where `rope_positions` lives; default: CUDA if available, else CPU.

    Raises:
        ValueError: cu_seqlens not increasing from 0, or mask and cu_seqlens of other lengths.
        NotImplementedError: a mask together with sliding-window layers.
    """
    raise NotImplementedError


def from_packed_seq_params(
    stock: PackedSeqParams, model_config: TransformerConfig, cp_group: Any, **options: Any
) -> MagiPackedSeqParams:
    """The same for a stock thd `PackedSeqParams` over the whole (not yet dispatched) stream.

    Args:
        stock: qkv_format 'thd' with cu_seqlens_q (int32 [num_docs + 1]) over the full stream.
            cu_seqlens_q_padded is honoured: the padding of a document is a document of its own.
        options: as in `make_packed_seq_params`.

    Raises:
        ValueError: not thd, no cu_seqlens, or other boundaries for keys than for queries.
    """
    raise NotImplementedError


def pipeline_seq_length(
    total_seqlen: int, model_config: TransformerConfig, magi_config: MagiConfig | None = None
) -> int:
    """The `seq_length` to give Megatron's forward_backward_func: total_seqlen plus padding.

    A function of lengths only, never of the mask, so pipeline shapes are fixed for a run. Equal to
    total_seqlen when that divides by CP (times TP under sequence parallelism).
    """
    raise NotImplementedError
