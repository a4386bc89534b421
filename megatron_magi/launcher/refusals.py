"""What of a Megatron job does not work with our switch, all of it at once.

Every rule reads Megatron's arguments and yields one line for each setting that it refuses, with
what is required, what came and what to do. `refuse_arguments` ends the process with all lines. The
adapter checks what it needs of a model again, because own training loops have no such arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.graphs import (
    PARTS_WITHOUT_ATTENTION,
    captures_attention,
    graph_parts,
)
from megatron_magi.adapter.packed import head_shape, pipeline_seq_length
from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel.select import choose_backend_name, select_backend
from megatron_magi.core.kernel.widths import Widths
from megatron_magi.core.plan import HeadShape
from megatron_magi.launcher.norms import HAS_FUSED_NORMS

REQUIRES = "--attention-backend magi requires"

Rule = Callable[[Any, MagiConfig], Iterator[str]]
"""(Megatron's arguments, our config) -> one line for each refused setting."""


@dataclass(frozen=True)
class Refusal:
    """A Megatron argument with which a run would stop or be wrong."""

    argument: str
    """Its name in Megatron's namespace; a version without it has nothing to refuse."""
    works: tuple[Any, ...]
    """Its values that work."""
    remedy: str
    """What to do, and why the value does not work."""

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
        "hybrid_context_parallel", _OFF, "leave it out: our plan balances documents over the ranks"
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
    Refusal("enable_cuda_graph", _OFF, "leave it out: plans change"),
    Refusal("external_cuda_graph", _OFF, "leave it out: plans change"),
    Refusal("fp8_dot_product_attention", _OFF, "leave it out: attention runs in bf16 or fp16"),
    Refusal("fp8_multi_head_attention", _OFF, "leave it out: attention runs in bf16 or fp16"),
    Refusal(
        "experimental_attention_variant",
        (None,),
        "leave it out: it is no softmax attention over rows",
    ),
    Refusal("use_legacy_models", _OFF, "leave it out"),
    Refusal("yaml_cfg", (None,), "write flags"),
    Refusal("perform_rl_step", _OFF, "leave it out: it packs and scores outside the schedule"),
    Refusal("modelopt_enabled", _OFF, "leave it out"),
    Refusal("logits_load_dir", (None,), "leave it out: rows change places"),
    Refusal("logits_save_dir", (None,), "leave it out: rows change places"),
    Refusal("retro_add_retriever", _OFF, "leave it out"),
)
"""Settings that are refused by their value alone."""

OTHER_LAYERS = {"M": "Mamba", "G": "gated delta net", "D": "sparse attention"}
"""Symbols of a hybrid layer pattern that our rows do not suit."""

HYBRID_SPECS = ("hybrid_layer_specs", "mamba_layer_specs")
"""Megatron's modules of hybrid specs, which are made of TransformerEngine's layers."""

POSITIONS = ("rope", "yarn", "learned_absolute", "none", None)
"""Kinds of positions that follow the rows of a plan."""


def refusals(args: Any, magi: MagiConfig | None = None, *, here: bool = True) -> list[str]:
    """One line for every setting that does not work; an empty list for a job that starts.

    Args:
        args: Megatron's arguments as they were parsed, before `validate_args`.
        magi: our own settings; default `MagiConfig()`.
        here: whether the job runs on this machine; else the rules about the machine are left out.
    """
    config = MagiConfig() if magi is None else magi
    lines = [line for row in REFUSALS for line in row.lines(args)]
    lines += [line for rule in RULES for line in rule(args, config)]
    return lines + (machine_refusals(args, config) if here else [])


def machine_refusals(args: Any, magi: MagiConfig) -> list[str]:
    """Those of `refusals` that are about this machine."""
    return [line for rule in MACHINE_RULES for line in rule(args, magi)]


def refuse_arguments(args: Any, magi: MagiConfig | None = None) -> None:
    """End the process if the job has a setting that does not work.

    Raises:
        SystemExit: with one line for each, all at once.
    """
    lines = refusals(args, magi)
    if lines:
        raise SystemExit("\n".join(lines))


def balances_samples(args: Any) -> bool:
    """Whether routers balance the experts of every sample by itself."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    return "seq_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)


def _layers(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Checked before anything is built, since layers may need packages of their own."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(args, name, None) or ""
        found = [f"{symbol} ({kind})" for symbol, kind in OTHER_LAYERS.items() if symbol in pattern]
        if found:
            yield (
                f"{REQUIRES} hybrid layers of attention (*), MLP (-) and MoE (E), got "
                f"{', '.join(found)} in {pattern!r} (--{name.replace('_', '-')}): state or "
                f"selection along the sequence does not follow the plan; leave them out"
            )


def _routers(args: Any, magi: MagiConfig) -> Iterator[str]:
    """A router would count padding rows, or balance samples without knowing them."""
    if not getattr(args, "num_experts", None):
        return
    rows = args.seq_length * args.micro_batch_size
    padded = pipeline_seq_length(rows, args, magi)
    if padded != rows:
        yield (
            f"--attention-backend magi with experts requires a microbatch that needs no padding, "
            f"got {rows} tokens (--seq-length), which {args.context_parallel_size} ranks hold as "
            f"{padded}: the router would count padding rows; change --seq-length"
        )
    joined = args.micro_batch_size > 1 and balances_samples(args)
    if joined and getattr(args, "overlap_moe_expert_parallel_comm", False):
        yield (
            f"{REQUIRES} --micro-batch-size 1 beside seq_aux_loss and "
            f"--overlap-moe-expert-parallel-comm (--moe-router-load-balancing-type), got "
            f"{args.micro_batch_size}: that schedule tells a router nothing of its samples; set 1, "
            f"or leave the overlap out"
        )


def _pairs_of_stages_over_gloo(args: Any, magi: MagiConfig) -> Iterator[str]:
    """0.17 pairs the messages of two pipeline stages wrongly, with and without our switch."""
    virtual = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    pair = args.pipeline_model_parallel_size == 2 and virtual
    over_gloo = getattr(args, "distributed_backend", "nccl") == "gloo"
    if MEGATRON_VERSION[:2] == (0, 17) and pair and over_gloo:
        yield (
            f"two pipeline stages with virtual stages over gloo require Megatron-LM 0.18 or later, "
            f"got {MEGATRON_VERSION}, which trains on other activations there without an error; "
            f"leave --num-layers-per-virtual-pipeline-stage out"
        )


def _inference_layers(args: Any, magi: MagiConfig) -> Iterator[str]:
    if args.transformer_impl == "inference_optimized":
        yield (
            f"{REQUIRES} --transformer-impl local or transformer_engine, got inference_optimized; "
            f"choose one of them"
        )


def _absent_transformer_engine(args: Any, magi: MagiConfig) -> Iterator[str]:
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    module = (getattr(args, "spec", None) or [""])[0]
    if module.endswith(HYBRID_SPECS):
        yield (
            f"--spec {module} requires TransformerEngine, got none; install it or pass --spec "
            f"megatron_magi.adapter.hybrid_spec hybrid_local_spec"
        )
    elif args.transformer_impl == "transformer_engine":
        yield (
            "--transformer-impl transformer_engine requires TransformerEngine, got none; install "
            "it or pass --transformer-impl local"
        )


def _graphs(args: Any, magi: MagiConfig) -> Iterator[str]:
    if captures_attention(args):
        yield (
            f"{REQUIRES} CUDA graphs without attention, got {args.cuda_graph_impl} over "
            f"{' '.join(graph_parts(args)) or 'whole layers'} (--cuda-graph-impl): an exchange "
            f"between ranks and a plan that changes cannot be captured; set none, or "
            f"transformer_engine with parts of {' '.join(PARTS_WITHOUT_ATTENTION)}"
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
    if getattr(args, "multi_latent_attention", False) and split:
        yield (
            f"{REQUIRES} --sequence-parallel beside --multi-latent-attention with tensor "
            f"parallelism, got {args.tensor_model_parallel_size} tensor-parallel ranks without it: "
            f"Megatron's gradients differ from those of one process; pass --sequence-parallel"
        )


def heads_of(args: Any) -> HeadShape:
    """The job's attention heads on one tensor-parallel rank."""
    return head_shape(_ModelSizes(args, _dtype(args)))


def _heads(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Every key head of a tensor-parallel rank must serve as many query heads."""
    if not getattr(args, "num_attention_heads", None) or not getattr(args, "hidden_size", None):
        return  # a checkpoint, or a script of another model, brings them
    try:
        heads_of(args)
    except ValueError as error:
        yield (f"{error} (--num-attention-heads, --num-query-groups, --tensor-model-parallel-size)")


def kernel_here(args: Any, magi: MagiConfig) -> str:
    """The kernel that the job's attention runs on this machine.

    Raises:
        NotImplementedError, ImportError, RuntimeError: the one that was asked for does not run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = heads_of(args)
    widths = Widths(heads.head_dim, heads.value_dim)
    if magi.kernel_backend == "auto":
        return choose_backend_name(device, _dtype(args), widths)
    return select_backend(magi.kernel_backend, device, _dtype(args), widths).name


def _dtype(args: Any) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _kernel(args: Any, magi: MagiConfig) -> Iterator[str]:
    """The kernel that was asked for must run on this machine."""
    if magi.kernel_backend == "auto" or any(_heads(args, magi)):
        return
    try:
        kernel_here(args, magi)
    except (NotImplementedError, ImportError, RuntimeError) as error:
        yield f"{error} (--magi-kernel {magi.kernel_backend})"


def _transport_here(args: Any, magi: MagiConfig) -> Iterator[str]:
    if magi.transport not in ("auto", "all_to_all") and not torch.cuda.is_available():
        yield (
            f"--magi-transport {magi.transport} requires GPUs of one host, got a machine without "
            f"CUDA; set auto or all_to_all"
        )


def _chunks(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Every rank must get a chunk of the microbatch."""
    length = getattr(args, "seq_length", None)
    if magi.chunk_size is None or length is None:
        return
    tokens, ranks = length * args.micro_batch_size, args.context_parallel_size
    if -(-tokens // magi.chunk_size) < ranks:
        yield (
            f"--magi-chunk-size must leave each of {ranks} context-parallel ranks a chunk of "
            f"{tokens} tokens (--seq-length times --micro-batch-size), got {magi.chunk_size}; use "
            f"at most {max(1, tokens // ranks)}, or leave it out"
        )


def _local_norms(args: Any, magi: MagiConfig) -> Iterator[str]:
    """What Megatron puts in place of fused norms takes no sequence parallelism, and ours is an
    RMSNorm."""
    norm = getattr(args, "normalization", "RMSNorm")
    split = args.sequence_parallel and args.transformer_impl == "local"
    if split and norm != "RMSNorm" and not HAS_FUSED_NORMS:
        yield (
            f"--sequence-parallel with --transformer-impl local requires --normalization RMSNorm "
            f"where TransformerEngine and apex are absent, got {norm}; install one of them or "
            f"change the norm"
        )


def _transport_of_restarts(args: Any, magi: MagiConfig) -> Iterator[str]:
    if magi.transport not in ("auto", "all_to_all") and getattr(args, "inprocess_restart", False):
        yield (
            f"--inprocess-restart requires --magi-transport auto or all_to_all, got "
            f"{magi.transport}: a restart ends exchanges over NCCL, and no copies that wait for a "
            f"lost rank; set auto or all_to_all"
        )


class _ModelSizes:
    """Megatron's arguments as `head_shape` reads a model's config."""

    def __init__(self, args: Any, dtype: torch.dtype) -> None:
        self._args = args
        self.params_dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._args, name, None)
        if name == "kv_channels" and value is None:
            return self._args.hidden_size // self._args.num_attention_heads
        if name == "num_query_groups" and not getattr(self._args, "group_query_attention", True):
            return None  # Megatron's default is 1, and counts beside that flag alone
        return value


RULES: tuple[Rule, ...] = (
    _layers,
    _routers,
    _pairs_of_stages_over_gloo,
    _inference_layers,
    _graphs,
    _positions,
    _latent_attention,
    _heads,
    _chunks,
    _transport_of_restarts,
)
"""Settings that are refused beside others."""

MACHINE_RULES: tuple[Rule, ...] = (
    _absent_transformer_engine,
    _local_norms,
    _kernel,
    _transport_here,
)
"""Settings that this machine cannot follow; another one may."""
