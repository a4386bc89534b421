"""A rank's rows of a batch for models of Transformers, and the plans that its layers attend by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi import AttnMask, AttnPlan, HeadShape, MagiConfig, PrefixTree, dispatch
from megatron_magi import plan as plan_for
from megatron_magi.checks import instance
from megatron_magi.core.comm.process_group import CpGroup
from megatron_magi.core.tensor_checks import tensor
from megatron_magi.huggingface.batch_documents import BatchShape, Documents, find_documents
from megatron_magi.huggingface.layer_kinds import other_layers, with_own_attention

IGNORED = -100
"""The label that Transformers leaves out of the loss."""
_ATTRIBUTE = "_magi_batch"
"""Of position ids: the batch that they were dispatched with."""


@dataclass(frozen=True)
class Packing:
    """How the tokens of a batch belong together."""

    position_ids: Tensor | None = None
    """int64 [B, S], restarting at every document; None: 0 to S - 1 in every sequence."""
    cu_seqlens: Tensor | None = None
    """Prefix sums of the documents over all B * S rows, instead of restarting positions."""
    attention_mask: Tensor | None = None
    """bool or integer [B, S], 0 for padding, which stands at the beginning and the end of a
    sequence, and 1 for tokens; None: no padding."""
    tree: PrefixTree | None = None
    """The rows of one sequence as a tree, whose branches share their beginnings; it stands for
    everything above. Pass no labels: see `tree_edges`."""


class DispatchedBatch:
    """A batch that is spread over a context-parallel group, as its layers see it.

    No dataclass, because PyTorch's FSDP in mixed precision gives each layer a copy of those.
    """

    def __init__(
        self,
        documents: Documents | TreeRows,
        cp_group: CpGroup,
        first: AttnPlan,
        config: MagiConfig,
    ) -> None:
        self.documents = documents
        """The documents of the whole batch, equal on every rank."""
        self.cp_group = cp_group
        """The group over which the rows are spread."""
        self.first = first
        """The plan of the whole documents, by which the rows were dispatched."""
        self.config = config
        """The engine's configuration, equal on every rank."""
        self.plans: dict[tuple[int | None, HeadShape], AttnPlan] = {}
        """The plans of layers so far, by window and heads."""

    def plan(self, window: int | None, heads: HeadShape) -> AttnPlan:
        """The plan of layers with this window and these heads, on the layout of the batch."""
        key = (window, heads)
        if key not in self.plans:
            mask = self.documents.mask(window)
            self.plans[key] = plan_for(
                mask, self.cp_group, heads, self.config, layout=self.first.layout
            )
        return self.plans[key]


def dispatch_batch(
    input_ids: Tensor,
    labels: Tensor | None,
    model_config: Any,
    cp_group: CpGroup,
    packing: Packing | None = None,
    engine: MagiConfig | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch: call ``model(**dispatch_batch(...))``.

    Args:
        input_ids: int64 [B, S], the same on every rank of the group.
        labels: int64 [B, S] as for a model of one process: not shifted, -100 where a token is not
            counted. They are shifted here, because neighbours of the batch are not neighbours on a
            rank. None: no loss.
        model_config: the model's configuration. Of one with several parts it is the text's.
        cp_group: the context-parallel group, a mesh, or None for one rank.
        packing: positions, documents and padding; None: every sequence is one document.
        engine: the engine's configuration; None: the default.

    Returns:
        input_ids and position_ids [1, T] of this rank's T rows, ``magi_batch`` for the layers, and
        with labels also labels, shift_labels [1, T] and num_items_in_batch, the counted tokens of
        the whole batch. The loss is then this rank's share: sum it, and the gradients of all
        parameters, over the group.

    Raises:
        TypeError: something else than tensors, a configuration or a Packing, and tensors of a
            dtype that `find_documents` refuses.
        ValueError: tensors of another shape than input_ids', and what `find_documents` refuses.
        NotImplementedError: a model with layers that mix tokens without attention (state spaces,
            linear attention), that attend in chunks, or that never ask Transformers for their
            attention, so that a rank's rows would see each other alone.

    Cost: tensors of a GPU are copied to the host once, and the plan is made on the host.
    """
    packing = Packing() if packing is None else packing
    instance(packing, Packing, "packing", "pass Packing(position_ids) or None")
    model_config = _checked_config(model_config)
    _check_shapes(input_ids, labels, packing)
    documents = _documents(input_ids, labels, packing)
    engine = MagiConfig() if engine is None else engine
    plan = plan_for(documents.mask(), cp_group, _head_shape(model_config, input_ids), engine)
    batch = DispatchedBatch(documents, cp_group, plan, engine)
    positions = _positions(input_ids, packing)
    local: dict[str, Any] = {
        "input_ids": _local(input_ids, batch),
        "position_ids": _carrying(_local(positions, batch), batch),
        "use_cache": False,
        "magi_batch": batch,
    }
    return local if labels is None else local | _local_labels(labels, batch)


def carried_batch(position_ids: Tensor | None) -> DispatchedBatch | None:
    """The batch that position ids were dispatched with; None: they were not, or are a copy."""
    return getattr(position_ids, _ATTRIBUTE, None)


def _carrying(position_ids: Tensor, batch: DispatchedBatch) -> Tensor:
    """The same tensor, marked, so that a layer notices if it comes without its batch."""
    setattr(position_ids, _ATTRIBUTE, batch)
    return position_ids


def _local(rows: Tensor, batch: DispatchedBatch, pad_value: int = 0) -> Tensor:
    return dispatch(rows.reshape(1, -1), batch.first, batch.cp_group, dim=1, pad_value=pad_value)


def _local_labels(labels: Tensor, batch: DispatchedBatch) -> dict[str, Any]:
    """The label of a row's next token, as Transformers shifts them inside of a sequence."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    local = _local(shifted, batch, IGNORED)
    counted = (shifted != IGNORED).sum().clamp(min=1)
    return {"labels": local, "shift_labels": local, "num_items_in_batch": counted}


@dataclass(frozen=True)
class TreeRows:
    """A tree where a batch usually has documents."""

    tree: PrefixTree

    def mask(self, window: int | None = None) -> AttnMask:
        """The tree's mask.

        Raises:
            NotImplementedError: a layer with a window.
        """
        if window is not None:
            raise NotImplementedError(
                f"a tree needs layers without a window, got one of {window} keys; pack the "
                f"branches as documents"
            )
        return self.tree.mask()


def _documents(input_ids: Tensor, labels: Tensor | None, packing: Packing) -> Documents | TreeRows:
    tree = packing.tree
    if tree is None:
        return find_documents(
            BatchShape(input_ids.shape[0], input_ids.shape[1]),
            packing.position_ids, packing.cu_seqlens, packing.attention_mask,
        )  # fmt: skip
    instance(tree, PrefixTree, "packing.tree", "pass a PrefixTree or None")
    given = [
        n
        for n in ("position_ids", "cu_seqlens", "attention_mask")
        if getattr(packing, n) is not None
    ]
    given += ["labels"] * (labels is not None)
    if given:
        raise ValueError(
            f"a tree has positions and targets of its own, got {', '.join(given)} with it; leave "
            f"them out, and take log-probabilities from tree_edges"
        )
    if tuple(input_ids.shape) != (1, tree.total_seqlen):
        raise ValueError(
            f"input_ids must be the tree's rows, [1, {tree.total_seqlen}], got "
            f"{list(input_ids.shape)}; lay its nodes out in their order"
        )
    return TreeRows(tree)


def _positions(input_ids: Tensor, packing: Packing) -> Tensor:
    """int64 [B, S]; without any the positions that a model gives itself, also over documents."""
    if packing.tree is not None:
        return torch.from_numpy(packing.tree.positions()).to(input_ids.device)[None]
    given = packing.position_ids
    if given is not None:
        if given.shape not in (input_ids.shape, (1, input_ids.shape[1])):
            raise ValueError(
                f"packing.position_ids must have the shape of input_ids, {list(input_ids.shape)}, "
                f"or one row for all, got {list(given.shape)}; pass one position for each token"
            )
        return given.expand(input_ids.shape)
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)


def _head_shape(model_config: Any, input_ids: Tensor) -> HeadShape:
    """The heads of the model's layers, by which the rows are spread."""
    num_heads = model_config.num_attention_heads
    num_kv = getattr(model_config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // num_heads
    return HeadShape(num_heads, num_kv, head_dim, 4 if input_ids.device.type == "cpu" else 2)


def _checked_config(model_config: Any) -> Any:
    """That of the text, if its layers can attend over a group."""
    text = getattr(model_config, "get_text_config", lambda: model_config)()
    others, own = other_layers(text), with_own_attention(text)
    for is_wrong, needs, got in (
        (others, "layers that mix tokens by attention alone", others),
        (own, "layers that ask Transformers for their attention", f"{own}, which has its own"),
    ):
        if is_wrong:
            raise NotImplementedError(
                f"context parallelism needs {needs}, got {got}; train this model without a cp_group"
            )
    if getattr(text, "num_attention_heads", None) is None:
        raise TypeError(
            f"model_config must be a model's configuration with num_attention_heads, got a "
            f"{type(model_config).__name__}; pass model.config"
        )
    return text


def _check_shapes(input_ids: Tensor, labels: Tensor | None, packing: Packing) -> None:
    for name in ("position_ids", "cu_seqlens", "attention_mask"):
        if getattr(packing, name) is not None:
            tensor(getattr(packing, name), f"packing.{name}")
    tensor(input_ids, "input_ids")
    if input_ids.ndim != 2:
        raise ValueError(
            f"input_ids must be [sequences, tokens], got {list(input_ids.shape)}; add a dimension"
        )
    if labels is not None:
        tensor(labels, "labels")
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels must have the shape of input_ids, {list(input_ids.shape)}, got "
                f"{list(labels.shape)}; pass one label per token, not shifted"
            )
