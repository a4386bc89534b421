"""Puts magi's core attention into the models that Megatron builds, and a plan into each forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_magi.adapter.carried_plan import (
    carried_plan,
    carry_selected,
    check_rows,
    forward_arguments,
    keep_plan,
)
from megatron_magi.adapter.core_attention import NOT_CAUSAL, MagiCoreAttention
from megatron_magi.adapter.layer_spec import with_magi_attention
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.plugin import prepare_model
from megatron_magi.adapter.rank_batch import dispatch_batch
from megatron_magi.launcher.captured_attention import require_whole_sequences
from megatron_magi.launcher.documents import (
    bounds_of_cu_seqlens,
    missing_documents,
    requested_mask,
    sequence_bounds,
)
from megatron_magi.launcher.moe_samples import give_samples
from megatron_magi.launcher.norms import own_norms
from megatron_magi.launcher.opening import say_startup
from megatron_magi.launcher.session import LauncherState, hook

FORWARD_INPUTS = ("input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params")
"""Arguments of a schedule plan by which its rows are checked."""

SPECS = (
    "transformer_layer_spec",
    "hybrid_stack_spec",
    "mamba_stack_spec",
    "mtp_block_spec",
)
"""Constructor arguments of Megatron's models that hold layers."""


@hook
def wrap_model_init(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `GPTModel.__init__`, `HybridModel.__init__` and `MambaModel.__init__`."""
    if launch.args is None:
        raise RuntimeError(
            "--attention-backend magi requires arguments that Megatron's validate_args has "
            "seen, got a model before them; parse arguments by megatron.training.arguments"
        )
    config = build_with_magi(original, self, *args, **kwargs)
    _take_model(launch, self, config)


def build_with_magi(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model's constructor with MagiCoreAttention in its layer specs; returns its config."""
    given = inspect.signature(original).bind(self, *args, **kwargs)
    config = given.arguments["config"]
    for name in SPECS:
        spec = given.arguments.get(name)
        # A pipeline stage that only embeds has no layers.
        is_empty = isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs
        if spec is not None and not is_empty:
            given.arguments[name] = own_norms(with_magi_attention(spec), config)
    original(*given.args, **given.kwargs)
    return config


def keep(original: Callable[..., Any], launch: LauncherState) -> Callable[..., Any]:
    """For what stays; the table checks the arguments that magi's pre-hook of `GPTModel.forward`
    reads, or the adapter's replacement in models that have layers with state."""
    return original


@hook
def wrap_schedule_plan(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `GPTModel.build_schedule_plan`, which `--overlap-moe-expert-parallel-comm` calls in place
    of the forward, so that no pre-hook of the model runs."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    given = dict(list(call.arguments.items())[1:])
    _, given = _give_plan(launch, self, (), given)
    check_rows(self, (), {name: given[name] for name in FORWARD_INPUTS if name in given})
    return original(self, **given)


def _take_model(launch: LauncherState, model: Any, config: Any) -> None:
    prepare_chunk(launch, model)
    # It must run before the checks that prepare_model has registered.
    give_plan = functools.partial(_give_plan, launch)
    model.register_forward_pre_hook(give_plan, with_kwargs=True, prepend=True)
    launch.model_config = launch.model_config or config


def prepare_chunk(launch: LauncherState, model: Any) -> None:
    """Prepare one model chunk, without communication: Megatron's build is collective in an order of
    its own (tied embeddings meet across stages while other stages still build)."""
    prepare_model(model, launch.options.config)
    if launch.options.mask_name is None:
        _require_causal(model)
    give_samples(launch, model)


def _require_causal(model: Any) -> None:
    """Documents are causal inside without --magi-mask; the layer spec must ask for the same."""
    for name, module in model.named_modules():
        if isinstance(module, MagiCoreAttention) and module.attn_mask_type in NOT_CAUSAL:
            raise NotImplementedError(
                f"--attention-backend magi without --magi-mask requires causal attention, got "
                f"{module.attn_mask_type} at {name}; name the mask by --magi-mask"
            )


def _give_plan(
    launch: LauncherState, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook: Megatron's arguments with the plan that the rows were dispatched by."""
    given = forward_arguments(model, args, kwargs)
    given["attention_mask"] = None
    if launch.captures_attention():
        require_whole_sequences(given.get("packed_seq_params"))
    elif not isinstance(given.get("packed_seq_params"), MagiPackedSeqParams):
        given["packed_seq_params"] = _plan_of(launch, model, given)
    say_startup(launch)
    return (), given


def _plan_of(launch: LauncherState, model: Any, given: dict[str, Any]) -> MagiPackedSeqParams:
    stages = (("pre_process", "input_ids"), ("post_process", "labels"))
    for _, name in stages:  # a middle stage may get rows too, which it does not read
        packed = carried_plan(given.get(name))
        if packed is not None:
            return packed
    packed = _plan_of_selected(launch, given)
    if packed is not None:
        return packed
    if any(getattr(model, stage) for stage, _ in stages):
        raise ValueError(
            "with --attention-backend magi the model takes rows that magi's batch hook dispatched, "
            "got tokens or labels without a plan; slice batches by Megatron's own "
            "get_batch_on_this_cp_rank, which the hook replaces, or call dispatch_batch yourself"
        )
    return _plan_of_middle_stage(launch, given.get("packed_seq_params"))


def _plan_of_selected(launch: LauncherState, given: dict[str, Any]) -> MagiPackedSeqParams | None:
    """The plan by which the model selected its rows itself; None if the batch hook does it.

    One context-parallel rank has nothing to select, so that its model asks for no rows.
    """
    stock = given.get("packed_seq_params")
    rows = next((x for name in ("input_ids", "labels") if (x := given.get(name)) is not None), None)
    packed = carried_plan(stock)
    is_whole = getattr(stock, "qkv_format", None) == "thd" and launch.cp_group() is None
    if packed is None and is_whole and rows is not None:
        packed = plan_stream(launch, stock, rows.numel())
    if packed is not None:
        carry_selected(given, packed)
    return packed


def plan_stream(launch: LauncherState, stock: Any, total: int) -> MagiPackedSeqParams:
    """Plan a packed stream whose rows the model selects itself; the plan stays with ``stock``.

    Args:
        stock: Megatron's parameters of the whole stream, with cu_seqlens_q.
        total: rows of the stream.

    Raises:
        ValueError: boundaries that do not fit the stream.

    Cost: a first call waits until the boundaries are on the host.
    """
    packed = carried_plan(stock)
    if packed is not None:
        return packed
    bounds = bounds_of_cu_seqlens(stock.cu_seqlens_q, stock.cu_seqlens_q_padded, total)
    if not launch.has_said_startup:
        launch.documents = f"by cu_seqlens ({len(bounds) - 1} in the first microbatch)"
    packed = _plan_without_rows(launch, bounds)
    # Bridge's Qwen3-VL takes rows for packed wherever boundaries are set; Megatron asks the format.
    packed.cu_seqlens_q = packed.cu_seqlens_kv = stock.cu_seqlens_q
    keep_plan(stock, packed)
    return packed


def _plan_of_middle_stage(launch: LauncherState, stock: Any) -> MagiPackedSeqParams:
    """The plan of a pipeline stage that reads no rows, made from the boundaries alone."""
    if launch.sequences is None:
        raise RuntimeError(
            "with --attention-backend magi a model must run inside a schedule, got a forward "
            "outside one; take get_forward_backward_func from megatron.training.training"
        )
    return _plan_without_rows(launch, _bounds_of_middle_stage(launch, launch.sequences, stock))


def _plan_without_rows(launch: LauncherState, bounds: list[int]) -> MagiPackedSeqParams:
    mask = requested_mask(launch.mask_function(), bounds, None)
    packed = launch.plan(bounds, mask)
    dispatch_batch(None, packed, launch.cp_group())
    return packed


def _bounds_of_middle_stage(
    launch: LauncherState, sequences: tuple[int, int], stock: Any
) -> list[int]:
    bounds = launch.microbatch.bounds(draws=True) if launch.has_documents() else None
    if bounds is not None:
        return bounds
    bounds = sequence_bounds(sequences)
    if stock is not None:
        return bounds_of_cu_seqlens(stock.cu_seqlens_q, stock.cu_seqlens_q_padded, bounds[-1])
    if launch.expects_cu_seqlens():
        raise missing_documents()
    if launch.eod() is not None:
        raise ValueError(
            "documents by --reset-attention-mask require samples on every pipeline stage, got none "
            "on a middle one; build data sets by Megatron's BlendedMegatronDatasetBuilder"
        )
    return bounds
