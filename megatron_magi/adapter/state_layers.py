"""Layers that carry a state along the sequence (Mamba, gated delta net), on rows of magi's plans.

Megatron exchanges the rows of such a layer for heads: every context-parallel rank then computes all
rows of its share of the heads. The rows arrive in the order of the ranks, and Megatron reorders
them by its own zigzag. `install_state_layers` replaces that reordering by the one of the plan's
token layout, so no further byte moves, and the layers see the stream's documents as Megatron's
packed (THD) format describes them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.ssm import mamba_context_parallel
from torch import Tensor

from megatron_magi.adapter.graphs import captures_attention
from megatron_magi.adapter.monkeypatch import wrap_in_megatron
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.stream_view import ROWS, StreamParams, StreamRows, stream_view

Function = Callable[..., Any]

KINDS = {"MambaMixer": "M", "GatedDeltaProductMixer": "M", "GatedDeltaNet": "G"}
"""Class names of Megatron's layers with state that work, and their signs in a hybrid pattern; a
layer spec decides which of two an M is."""

OTHER_KINDS = ("GatedDelta",)
"""Prefixes of the class names of layers with state that do not work."""

DELTA_NET = "megatron.core.ssm.gated_delta_net.common"
"""Module of the gated delta net's exchange, since Megatron 0.19."""


def has_packed_delta_net() -> bool:
    """Returns True if this Megatron exchanges a gated delta net's rows in one piece (0.19)."""
    try:
        return importlib.util.find_spec(DELTA_NET) is not None
    except ModuleNotFoundError:
        return False


def sign_of(layer: Any) -> str | None:
    """Sign of a layer with state in a hybrid pattern; None for every other module."""
    signs = (KINDS.get(kind.__name__) for kind in type(layer).__mro__)
    return next((sign for sign in signs if sign is not None), None)


def state_layers(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of every layer with state that works.

    Raises:
        NotImplementedError: a layer with state of another kind.
    """
    for name, module in chunk.named_modules():
        kind = type(module).__name__
        if sign_of(module) is not None:
            yield name, module
        elif kind.startswith(OTHER_KINDS):
            raise NotImplementedError(
                f"this plugin requires layers of attention, MLP, MoE and {', '.join(KINDS)}, "
                f"got {kind} at {name}: its rows do not follow the plan; leave it out of the "
                f"model"
            )


def attach_state_layers(chunk: Any) -> None:
    """Let every layer with state take the stream's documents and order from the plan."""
    for _, layer in state_layers(chunk):
        install_state_layers()
        if not getattr(layer, "is_magi_attached", False):
            layer.is_magi_attached = True
            layer.register_forward_pre_hook(_give_stream, with_kwargs=True)


def install_state_layers() -> None:
    """Make Megatron's exchange of rows for heads follow magi's plans.

    Calls without magi's packed parameters use the stock functions. A second call changes nothing.
    """
    to_stream = functools.partial(_reordered, reorder=StreamRows.to_stream)
    to_ranks = functools.partial(_reordered, reorder=StreamRows.to_ranks)
    wrap_in_megatron(mamba_context_parallel, "_undo_attention_load_balancing", to_stream)
    wrap_in_megatron(mamba_context_parallel, "_redo_attention_load_balancing", to_ranks)
    if has_packed_delta_net():
        common = importlib.import_module(DELTA_NET)
        wrap_in_megatron(common, "_build_thd_cp_a2a_perm", _order_of_plan)
        stock = common._GDNBase._resolve_cu_seqlens
        if not hasattr(stock, "__wrapped__"):
            common._GDNBase._resolve_cu_seqlens = _documents_of_plan(stock)


def _give_stream(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a layer with state: its packed parameters, as the layer reads them."""
    packed = kwargs.get("packed_seq_params")
    cp_size = layer.pg_collection.cp.size()
    if not isinstance(packed, MagiPackedSeqParams):
        if packed is not None or (cp_size > 1 and not captures_attention(layer.config)):
            raise ValueError(
                f"{type(layer).__name__} requires MagiPackedSeqParams when tokens are packed or "
                f"context_parallel_size > 1, got {type(packed).__name__} with context_parallel_size"
                f"={cp_size}; make them with make_packed_seq_params and dispatch the batch by them"
            )
        return args, kwargs
    hidden = args[0] if args else kwargs["hidden_states"]
    _check_layout(layer, hidden, packed)
    return args, {**kwargs, "packed_seq_params": stream_view(packed)}


def _check_layout(layer: Any, hidden: Tensor, packed: MagiPackedSeqParams) -> None:
    """Raise ValueError for rows of another number, or of another number of ranks, than the plan's.
    The model compares the plans themselves before its first layer (`carried_plan`)."""
    layout, cp_size = packed.token_plan.layout, layer.pg_collection.cp.size()
    splits = layer.pg_collection.tp.size() if layer.config.sequence_parallel else 1
    rows, batch = hidden.shape[0] * splits, hidden.shape[1]
    wanted, got = (layout.num_local_tokens, 1, layout.cp_size), (rows, batch, cp_size)
    if got != wanted:
        raise ValueError(
            f"{type(layer).__name__} requires the rows of the plan's layout, {wanted[0]} x batch 1 "
            f"on each of {wanted[2]} ranks, got {rows} x batch {batch} on {cp_size}; dispatch the "
            f"batch by the same plan"
        )


def _reordered(stock: Function, reorder: Callable[[StreamRows, Tensor], Tensor]) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def by_plan(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        packed = given.get("packed_seq_params")
        if isinstance(packed, StreamParams):
            return reorder(packed.rows, given["input_"])
        if isinstance(packed, MagiPackedSeqParams):
            raise RuntimeError(
                "a layer with state must be attached before it takes packed rows, got one that "
                "was added later; call megatron_magi.adapter.plugin.attach(model) once it is built"
            )
        return stock(*args, **kwargs)

    return by_plan


def _documents_of_plan(stock: Function) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def resolve_cu_seqlens(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        cu_seqlens = given["cu_seqlens_actual"]
        # They were checked on the host; documents need not divide by the ranks.
        return cu_seqlens if hasattr(cu_seqlens, ROWS) else stock(*args, **kwargs)

    return resolve_cu_seqlens


def _order_of_plan(stock: Function) -> Function:
    @functools.wraps(stock)
    def build_thd_cp_a2a_perm(cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows: StreamRows | None = getattr(cu_seqlens, ROWS, None)
        if rows is None:
            return stock(cu_seqlens, *args, **kwargs)
        return rows.stream_order, rows.rank_order

    return build_thd_cp_a2a_perm
