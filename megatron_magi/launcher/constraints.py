"""Collects the unsupported settings of a Megatron job and reports them together.

Sizes below 1 come first and alone, because other values are computed from them.

Every rule reads Megatron's arguments and yields one line for each setting that it refuses, with
what is required, what came and what to do. `refuse_arguments` ends the process with all lines. The
adapter checks what it needs of a model again, because own training loops have no such arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_magi.adapter.max_logit import check_clip_layout
from megatron_magi.adapter.mtp import check_hidden_state_mixing
from megatron_magi.adapter.packed import pipeline_seq_length
from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.token_layout import check_chunk_size
from megatron_magi.launcher.balance_refusals import balance_refusals
from megatron_magi.launcher.captured_attention import refuse_captured_attention
from megatron_magi.launcher.job_sizes import (
    has_latent_layers,
    microbatch_tokens,
    refused_heads,
    splits_sequence,
    wrong_sizes,
)
from megatron_magi.launcher.machine_constraints import Rule, machine_refusals
from megatron_magi.launcher.state_refusals import hybrid_layers

REQUIRES = "--attention-backend magi requires"


@dataclass(frozen=True)
class Refusal:
    """A Megatron argument with which a run would stop or be wrong."""

    argument: str
    """Its name in Megatron's namespace; a version without it has nothing to refuse."""
    works: tuple[Any, ...]
    """Its values that work."""
    remedy: str
    """Remedy, and the reason why the value does not work."""

    @property
    def flag(self) -> str:
        """The argument as a user writes it on the command line."""
        return "--" + self.argument.replace("_", "-")

    def lines(self, args: Any) -> Iterator[str]:
        """One line if the argument has another value than those that work."""
        value = getattr(args, self.argument, self.works[0])
        if value not in self.works:
            yield (
                f"{REQUIRES} {self.argument}={self.works[0]!r}, got {value!r} ({self.flag}); "
                f"{self.remedy}"
            )


_OFF = (False, None, 0)

REFUSALS = (
    Refusal("attention_dropout", (0.0, 0), "set --attention-dropout 0"),
    Refusal(
        "hybrid_context_parallel", _OFF, "leave it out: the plan balances documents over the ranks"
    ),
    Refusal("dynamic_context_parallel", _OFF, "leave it out"),
    Refusal(
        "hierarchical_context_parallel_sizes",
        (None,),
        "leave it out and pass --magi-ranks-per-node: a row then crosses to each node once",
    ),
    Refusal(
        "sequence_packing_scheduler",
        (None,),
        "leave it out: it moves samples between ranks by itself",
    ),
    Refusal("enable_cuda_graph", _OFF, "name the graphs by --cuda-graph-impl local"),
    Refusal("external_cuda_graph", _OFF, "name them by --cuda-graph-impl transformer_engine"),
    Refusal("fp8_dot_product_attention", _OFF, "leave it out: attention runs in bf16 or fp16"),
    Refusal("fp8_multi_head_attention", _OFF, "leave it out: attention runs in bf16 or fp16"),
    Refusal(
        "experimental_attention_variant",
        (None,),
        "leave it out: it is no softmax attention over rows",
    ),
    Refusal("use_kitchen_attention", _OFF, "leave it out: magi computes attention"),
    Refusal("batch_invariant_mode", _OFF, "leave it out: a row's last bits depend on the plan"),
    Refusal("use_legacy_models", _OFF, "leave it out"),
    Refusal("yaml_cfg", (None,), "write flags"),
    Refusal("perform_rl_step", _OFF, "leave it out: it packs and scores outside the schedule"),
    Refusal("modelopt_enabled", _OFF, "leave it out"),
    Refusal("logits_load_dir", (None,), "leave it out: rows change places"),
    Refusal("logits_save_dir", (None,), "leave it out: rows change places"),
    Refusal("retro_add_retriever", _OFF, "leave it out"),
)
"""Settings that are refused by their value alone."""

POSITIONS = ("rope", "yarn", "learned_absolute", "none", None)
"""Kinds of positions that follow the rows of a plan."""


def refusals(
    args: Any,
    magi: MagiConfig | None = None,
    *,
    mask_name: str | None = None,
    balance_step: bool = False,
    here: bool = True,
) -> list[str]:
    """One line for every setting that does not work; an empty list for a job that starts.

    Args:
        args: Megatron's arguments as they were parsed, before `validate_args`.
        magi: magi's own settings; default `MagiConfig()`.
        mask_name: the value of --magi-mask.
        balance_step: whether --magi-balance-step is given.
        here: whether the job runs on this machine; else the rules about the machine are left out.
    """
    config = MagiConfig() if magi is None else magi
    if wrong := wrong_sizes(args):
        return wrong
    lines = [line for row in REFUSALS for line in row.lines(args)]
    lines += [line for rule in RULES for line in rule(args, config)]
    lines += refuse_captured_attention(args, config, mask_name)
    lines += balance_refusals(args, mask_name) if balance_step else []
    return lines + (machine_refusals(args, config) if here else [])


def refuse_arguments(
    args: Any,
    magi: MagiConfig | None = None,
    mask_name: str | None = None,
    balance_step: bool = False,
) -> None:
    """End the process if the job has a setting that does not work.

    Raises:
        SystemExit: with one line for each, all at once.
    """
    lines = refusals(args, magi, mask_name=mask_name, balance_step=balance_step)
    if lines:
        raise SystemExit("\n".join(lines))


def balances_samples(args: Any) -> bool:
    """True if routers balance the experts of every sample by itself."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    return "seq_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)


def _routers(args: Any, magi: MagiConfig) -> Iterator[str]:
    """A router would count padding rows, or balance samples without knowing them."""
    if not getattr(args, "num_experts", None):
        return
    for rows in microbatch_tokens(args):
        padded = pipeline_seq_length(rows, args, magi)
        if padded != rows:
            yield (
                f"--attention-backend magi with experts requires a microbatch that needs no "
                f"padding, got {rows} tokens (--seq-length), which {args.context_parallel_size} "
                f"ranks hold as {padded}: the router would count padding rows; change --seq-length"
            )
    joined = (args.micro_batch_size or 1) > 1 and balances_samples(args)
    if joined and getattr(args, "overlap_moe_expert_parallel_comm", False):
        yield (
            f"{REQUIRES} --micro-batch-size 1 with seq_aux_loss and "
            f"--overlap-moe-expert-parallel-comm (--moe-router-load-balancing-type), got "
            f"{args.micro_batch_size}: that schedule tells a router nothing of its samples; set 1, "
            f"or leave the overlap out"
        )


def _sft_documents(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Megatron's data set of conversations has documents of its own, and asserts so in a worker."""
    names = [name for name in ("reset_attention_mask", "reset_position_ids")
             if getattr(args, "sft", False) and getattr(args, name, False)]  # fmt: skip
    for name in names:
        yield (
            f"--sft requires a job without --{name.replace('_', '-')}, got both: its "
            f"conversations are documents already; leave that flag out"
        )


def _inference_layers(args: Any, magi: MagiConfig) -> Iterator[str]:
    if args.transformer_impl == "inference_optimized":
        yield (
            f"{REQUIRES} --transformer-impl local or transformer_engine, got inference_optimized; "
            f"choose one of them"
        )


def _positions(args: Any, magi: MagiConfig) -> Iterator[str]:
    kind = getattr(args, "position_embedding_type", None)
    if kind not in POSITIONS:
        yield (
            f"{REQUIRES} rope, yarn, learned absolute or no positions, got {kind} "
            f"(--position-embedding-type): its positions do not follow the rows of a plan; change "
            f"it"
        )


def _latent_attention(args: Any, magi: MagiConfig) -> Iterator[str]:
    split = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    if has_latent_layers(args) and split:
        yield (
            f"{REQUIRES} --sequence-parallel with --multi-latent-attention with tensor "
            f"parallelism, got {args.tensor_model_parallel_size} tensor-parallel ranks without it: "
            f"Megatron's gradients differ from those of one process; pass --sequence-parallel"
        )


def _heads(args: Any, magi: MagiConfig) -> Iterator[str]:
    line = refused_heads(args)
    if line is not None:
        yield line


def _of_the_model(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Settings that the adapter would reject in the built model."""
    shown = copy.copy(args)
    shown.sequence_parallel = splits_sequence(args)
    for check, flag in ((check_clip_layout, "--qk-clip"), (check_hidden_state_mixing, "--mtp-hsm")):
        try:
            check(shown)
        except NotImplementedError as error:
            yield f"{error} ({flag})"


def _stages_of_mtp(args: Any, magi: MagiConfig) -> Iterator[str]:
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if not isinstance(layout, (str, list)):
        return  # none, or one that is read already, of which the adapter reads what it needs
    stages = layout.split("|") if isinstance(layout, str) else layout
    mtp, loss = ("m", "L") if isinstance(layout, str) else ("mtp", "loss")
    if any(mtp in stage and loss not in stage for stage in stages):
        yield (
            f"{REQUIRES} the layers of multi-token prediction in the stage of the loss, got a "
            f"stage of their own in {layout} (--pipeline-model-parallel-layout); move them"
        )


def _chunks(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Every rank must get a chunk of a microbatch."""
    for tokens in microbatch_tokens(args):
        try:
            check_chunk_size(magi.chunk_size, tokens, args.context_parallel_size)
        except ValueError as error:
            yield f"{error} (--magi-chunk-size)"


def _transport_of_restarts(args: Any, magi: MagiConfig) -> Iterator[str]:
    if magi.transport not in ("auto", "all_to_all") and getattr(args, "inprocess_restart", False):
        yield (
            f"--inprocess-restart requires --magi-transport auto or all_to_all, got "
            f"{magi.transport}: a restart ends exchanges over NCCL, and no copies that wait for a "
            f"lost rank; set auto or all_to_all"
        )


RULES: tuple[Rule, ...] = (
    hybrid_layers,
    _routers,
    _sft_documents,
    _inference_layers,
    _positions,
    _latent_attention,
    _heads,
    _of_the_model,
    _stages_of_mtp,
    _chunks,
    _transport_of_restarts,
)
"""Settings that are refused together with others."""
