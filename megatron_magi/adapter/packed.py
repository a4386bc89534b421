"""The parameter object that Megatron passes along: plans and positions of one microbatch.

Megatron passes one `packed_seq_params` object unchanged through model, block (also when layers are
recomputed), layer and attention to the core attention. `MagiPackedSeqParams` is such an object with
plans in it. Its format is 'sbhd' although the tokens are packed, so that Megatron takes its
plain per-token path (no THD special cases in attention or RoPE). Only the plan's mask knows the
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_magi.adapter.document_plans import MaskKind, document_plans
from megatron_magi.adapter.model_shape import (
    check_model_config,
    is_window_layer,
    token_multiple,
    window_layers,
)
from megatron_magi.checks import instance, int_array
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm.process_group import group_rank, resolve_group
from megatron_magi.core.cuda.tables import upload
from megatron_magi.core.mask import PrefixTree
from megatron_magi.core.mask.mask import MaskOfLayers
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, num_local_tokens
from megatron_magi.core.runtime.prepared import prepare
from megatron_magi.core.runtime.token_dispatch import position_ids
from megatron_magi.core.tensor_checks import device as checked_device
from megatron_magi.core.tensor_checks import on_host


@dataclass
class MagiPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """One microbatch's attention plans and RoPE positions, as Megatron's `PackedSeqParams`.

    The stock fields that are set: qkv_format 'sbhd', max_seqlen_q/kv (padded global length) and
    cp_group.
    """

    plan: AttnPlan | None = None
    """Plan of the layers without a sliding window; None when every layer has one."""

    window_plan: AttnPlan | None = None
    """Plan of sliding-window layers, on the same token layout; None if no layer has a window."""

    rope_positions: Tensor | None = None
    """int64 [num_local_tokens], the RoPE position of each local row."""

    last_rows: Tensor | None = None
    """int64, the local rows without a next token in their document, padding included; None without
    multi-token prediction."""

    is_token: Tensor | None = None
    """bool [num_local_tokens], False on padding; None without multi-token prediction."""

    document_bounds: npt.NDArray[np.int64] | None = None
    """Prefix sums of document lengths on the host, without padding; layers with state restart at
    them."""

    has_branches: bool = False
    """True for a tree, in which the row before is not the one that a state comes from."""

    digest: int | None = None
    """64-bit hash of both plans and of the documents' boundaries, from which the positions come."""

    @property
    def token_plan(self) -> AttnPlan:
        """The plan that tokens are dispatched by (both plans share one token layout)."""
        plan = self.plan if self.plan is not None else self.window_plan
        assert plan is not None, "a MagiPackedSeqParams has at least one plan"
        return plan

    def plan_of_layer(self, model_config: TransformerConfig, layer_number: int) -> AttnPlan:
        """The plan of one layer; layer_number counts from 1, as Megatron does."""
        plan = self.window_plan if is_window_layer(model_config, layer_number) else self.plan
        assert plan is not None, f"no plan was made for layer {layer_number}"
        return plan


def make_packed_seq_params(
    cu_seqlens: Sequence[int] | np.ndarray | Tensor,
    model_config: TransformerConfig,
    cp_group: Any,
    *,
    magi_config: MagiConfig | None = None,
    mask: MaskOfLayers | PrefixTree | MaskKind = "causal",
    device: torch.device | str | None = None,
) -> MagiPackedSeqParams:
    """Plan one microbatch; every pipeline stage and CP rank calls it with the same arguments.

    Args:
        cu_seqlens: [num_docs + 1] prefix sums of document lengths in tokens, first 0; the last is
            the length of the packed stream. RoPE positions start at 0 in every document; with
            [0, length] they continue over the stream. Pass host data: a CUDA tensor costs a
            synchronisation.
        model_config: Heads, head dim, TP size, sequence parallelism and window_size are read.
        cp_group: Context-parallel ProcessGroup, or 1-D or 2-D DeviceMesh; None means size 1.
        magi_config: Planner and kernel knobs; default `MagiConfig()`.
        mask: What a token sees in its document, "causal" or "full", or any AttnMask over the
            stream. `model_config.window_size`, in tokens of the stream, narrows it in the layers
            that Megatron calls window layers (window_attn_skip_freq). Two masks, (layers without a
            window, window layers), let both kinds differ in more than the window, e.g.
            `masks.chunked`. Or a PrefixTree, with cu_seqlens [0, its rows]: RoPE positions continue
            along each branch.
        device: Of `rope_positions`; default: CUDA if available, else CPU.

    Raises:
        TypeError: a mask that is neither a word nor an AttnMask or two, cu_seqlens that are not
            integers, no model config, or another cp_group.
        ValueError: cu_seqlens that do not increase from 0, a mask of another length, another word,
            two masks for a model without window layers, or no such device.
        NotImplementedError: a model with experts, and a stream that the plan pads; a tree, and
            multi-token prediction or window layers.
    """
    bounds = _host_bounds(cu_seqlens)
    check_model_config(model_config)
    resolve_group(cp_group)  # an integer, which the planner takes as a size, names no group here
    config = MagiConfig() if magi_config is None else magi_config
    tree = None
    if isinstance(mask, PrefixTree):
        tree, mask = mask, mask.mask()
        _check_tree(tree, bounds, model_config)
    plan, window_plan = document_plans(bounds, model_config, cp_group, config, mask)
    packed = _assemble(plan, window_plan, bounds, cp_group, device)
    if tree is not None:
        _take_positions(packed, tree)
    if getattr(model_config, "mtp_num_layers", None):
        _mark_document_ends(packed, bounds)
    return packed


def from_packed_seq_params(
    stock: PackedSeqParams, model_config: TransformerConfig, cp_group: Any, **options: Any
) -> MagiPackedSeqParams:
    """Plan one microbatch from a stock thd `PackedSeqParams` over the whole, undispatched stream.

    Args:
        stock: qkv_format 'thd' with cu_seqlens_q (int32 [num_docs + 1]) over the full stream.
            With cu_seqlens_q_padded, the padding of each document becomes another document.
        options: as in `make_packed_seq_params`.

    Raises:
        TypeError: no PackedSeqParams.
        ValueError: not thd, no cu_seqlens, or other boundaries for keys than for queries.
    """
    instance(stock, PackedSeqParams, "stock", "pass Megatron's packed_seq_params")
    if stock.qkv_format != "thd" or stock.cu_seqlens_q is None:
        raise ValueError(
            f"packed_seq_params must be thd with cu_seqlens_q, got qkv_format="
            f"{stock.qkv_format!r} and cu_seqlens_q={stock.cu_seqlens_q}; set both"
        )
    bounds = _host_bounds(stock.cu_seqlens_q)
    _check_keys(bounds, stock.cu_seqlens_kv)
    padded = bounds
    if stock.cu_seqlens_q_padded is not None:
        padded = _host_bounds(stock.cu_seqlens_q_padded)
        bounds = _with_padding(bounds, padded)
    _check_keys(padded, stock.cu_seqlens_kv_padded)
    return make_packed_seq_params(bounds, model_config, cp_group, **options)


def pipeline_seq_length(
    total_seqlen: int, model_config: TransformerConfig, magi_config: MagiConfig | None = None
) -> int:
    """The `seq_length` to pass to Megatron's forward_backward_func: total_seqlen plus padding.

    It is a function of lengths only, never of the mask, so pipeline shapes are fixed for a run.
    Nothing is padded if CP (times TP under sequence parallelism) divides total_seqlen and a rank's
    share divides into 8 to 64 chunks; ``num_local_tokens`` of core/plan/token_layout.py has the
    rule.

    Raises:
        TypeError: no model config.
    """
    check_model_config(model_config)
    cp_size = model_config.context_parallel_size
    config = MagiConfig() if magi_config is None else magi_config
    return cp_size * num_local_tokens(total_seqlen, cp_size, config, token_multiple(model_config))


def _assemble(
    plan: AttnPlan | None,
    window_plan: AttnPlan | None,
    bounds: npt.NDArray[np.int64],
    cp_group: Any,
    device: torch.device | str | None,
) -> MagiPackedSeqParams:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checked_device(device)
    packed = MagiPackedSeqParams(
        qkv_format="sbhd", cp_group=cp_group, plan=plan, window_plan=window_plan
    )
    packed.document_bounds = bounds
    layout = packed.token_plan.layout
    rows = position_ids(packed.token_plan, cp_group)
    in_document = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    packed.rope_positions = upload(torch.from_numpy(in_document)[rows], device)
    packed.max_seqlen_q = packed.max_seqlen_kv = layout.padded_seqlen
    digests = [0 if each is None else each.digest for each in (plan, window_plan)]
    packed.digest = solver.hash64(np.array(digests, dtype=np.uint64).tobytes() + bounds.tobytes())
    for each in (plan, window_plan):
        if each is not None:
            prepare(each, cp_group, device)  # here, so that a data loader's thread can do it
    return packed


def _check_tree(
    tree: PrefixTree, bounds: npt.NDArray[np.int64], model_config: TransformerConfig
) -> None:
    if bounds.tolist() != [0, tree.total_seqlen]:
        raise ValueError(
            f"a tree must fill the stream, got cu_seqlens {bounds[:8].tolist()} for a tree of "
            f"{tree.total_seqlen} rows; pass [0, tree.total_seqlen]"
        )
    if any(window_layers(model_config)):
        raise NotImplementedError(
            f"a tree requires a model without window layers, whose window would count the rows of "
            f"other branches, got window_size={model_config.window_size}; set it to None"
        )
    if getattr(model_config, "mtp_num_layers", None):
        raise NotImplementedError(
            f"a tree requires a model without multi-token prediction, whose tokens would have "
            f"several next ones, got mtp_num_layers={model_config.mtp_num_layers}; set it to None"
        )


def _take_positions(packed: MagiPackedSeqParams, tree: PrefixTree) -> None:
    """Let RoPE follow the branches, and let ranks with other positions notice."""
    assert packed.rope_positions is not None, "an assembled object has positions"
    packed.has_branches = True
    positions = tree.positions()
    rows = position_ids(packed.token_plan, packed.cp_group)
    padded = np.concatenate([positions, np.zeros(packed.max_seqlen_q - len(positions), np.int64)])
    packed.rope_positions = upload(torch.from_numpy(padded)[rows], packed.rope_positions.device)
    seen = np.array([packed.digest], dtype=np.uint64).tobytes() + positions.tobytes()
    packed.digest = solver.hash64(seen)


def _mark_document_ends(packed: MagiPackedSeqParams, bounds: npt.NDArray[np.int64]) -> None:
    assert packed.rope_positions is not None, "an assembled object has positions"
    rows = packed.token_plan.layout.position_ids(group_rank(packed.cp_group))
    is_token = rows < bounds[-1]
    last = np.flatnonzero(~is_token | np.isin(rows, bounds[1:] - 1))
    device = packed.rope_positions.device
    packed.last_rows = upload(torch.from_numpy(last), device)
    packed.is_token = upload(torch.from_numpy(is_token), device)


def _host_bounds(cu_seqlens: npt.ArrayLike | Tensor) -> npt.NDArray[np.int64]:
    host = on_host(cu_seqlens, "cu_seqlens") if isinstance(cu_seqlens, Tensor) else cu_seqlens
    bounds = int_array(host, "cu_seqlens")
    bounds = bounds[0] if bounds.ndim == 2 and len(bounds) == 1 else bounds  # a batch of one stream
    if (
        bounds.ndim != 1
        or len(bounds) < 2
        or bounds[0] != 0
        or (np.diff(bounds) < 0).any()
        or bounds[-1] == 0
    ):
        raise ValueError(
            f"cu_seqlens must be prefix sums of document lengths that begin with 0 and end with "
            f"the stream's length, got {bounds.tolist()[:8]}; pass [0, len0, len0 + len1, ...]"
        )
    return bounds


def _check_keys(bounds: npt.NDArray[np.int64], cu_seqlens_kv: Tensor | None) -> None:
    if cu_seqlens_kv is None:
        return
    keys = _host_bounds(cu_seqlens_kv)
    if not np.array_equal(bounds, keys):
        raise ValueError(
            f"self-attention requires equal document boundaries of queries and keys, got "
            f"{bounds.tolist()} and {keys.tolist()}; pass one cu_seqlens for both"
        )


def _with_padding(
    bounds: npt.NDArray[np.int64], padded: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Boundaries in the padded stream; each document's padding becomes another document."""
    lengths = np.diff(bounds)
    if len(padded) != len(bounds) or (np.diff(padded) < lengths).any():
        raise ValueError(
            f"cu_seqlens_q_padded must have room for every document of cu_seqlens_q, got "
            f"{padded.tolist()} for {bounds.tolist()}; pad the same documents"
        )
    ends = padded[:-1] + lengths
    return np.unique(np.concatenate([padded, ends]))
