"""Megatron's arguments under our switch: which are set, lifted or refused."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.launcher.launch import Launch, hook


@dataclass(frozen=True)
class Refusal:
    """A Megatron argument with which a run would stop or be wrong, or that was never tried."""

    argument: str
    """Its name in Megatron's namespace; a version without it has nothing to refuse."""
    works: tuple[Any, ...]
    """Its values that work."""
    remedy: str

    @property
    def flag(self) -> str:
        """As a user writes it."""
        return "--" + self.argument.replace("_", "-")


_OFF = (False, None, 0)

REFUSALS = (
    Refusal("async_save", _OFF, "leave it out: saves run in process here"),
    Refusal("attention_dropout", (0.0, 0), "set --attention-dropout 0"),
    Refusal(
        "hybrid_context_parallel", _OFF, "leave it out: our plan balances documents over the ranks"
    ),
    Refusal("dynamic_context_parallel", _OFF, "leave it out"),
    Refusal(
        "hierarchical_context_parallel_sizes",
        (None,),
        "leave it out: it belongs to another communication",
    ),
    Refusal(
        "sequence_packing_scheduler",
        (None,),
        "leave it out: it moves samples between ranks by itself",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm", _OFF, "leave it out: its schedule passes our checks by"
    ),
    Refusal("cuda_graph_impl", ("none", None), "set none: plans change"),
    Refusal("enable_cuda_graph", _OFF, "leave it out: plans change"),
    Refusal("external_cuda_graph", _OFF, "leave it out: plans change"),
    Refusal("fp8_dot_product_attention", _OFF, "leave it out"),
    Refusal("fp8_multi_head_attention", _OFF, "leave it out"),
    Refusal("tp_comm_overlap", _OFF, "leave it out: it was never tried here"),
    Refusal("cpu_offloading", _OFF, "leave it out: it was never tried here"),
    Refusal("fine_grained_activation_offloading", _OFF, "leave it out: it was never tried here"),
    Refusal(
        "experimental_attention_variant",
        (None,),
        "leave it out: it is no softmax attention over rows",
    ),
    Refusal("use_legacy_models", _OFF, "leave it out"),
    Refusal("yaml_cfg", (None,), "write flags"),
    Refusal("perform_rl_step", _OFF, "leave it out: it was never tried here"),
    Refusal("modelopt_enabled", _OFF, "leave it out"),
    Refusal("logits_load_dir", (None,), "leave it out: rows change places"),
    Refusal("logits_save_dir", (None,), "leave it out: rows change places"),
    Refusal("retro_add_retriever", _OFF, "leave it out"),
    Refusal(
        "use_torch_fsdp2",
        _OFF,
        "leave it out: it does not divide gradients by tokens; use --use-distributed-optimizer",
    ),
    Refusal("use_megatron_fsdp", _OFF, "leave it out: it was never tried here"),
    Refusal(
        "inprocess_restart",
        _OFF,
        "leave it out: restarted ranks would not meet the others' comparison of plans",
    ),
    Refusal("ddp_average_in_collective", _OFF, "leave it out"),
)
"""Everything of Megatron that touches attention or batches and does not work with our switch."""

OTHER_LAYERS = {"M": "Mamba", "G": "gated delta net", "D": "sparse attention"}
"""Symbols of a hybrid layer pattern that our rows do not suit."""

HYBRID_SPECS = ("hybrid_layer_specs", "mamba_layer_specs")
"""Megatron's modules of hybrid specs, which are made of TransformerEngine's layers."""


@hook
def wrap_validate_args(launch: Launch, original: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """For `validate_args`: our refusals come first, then our settings, then Megatron's checks."""
    refuse_arguments(args)
    said = change_settings(args)
    with any_seq_length(args):
        result = original(args, *rest, **kwargs)
    launch.args = args
    if said and args.rank == 0:
        print(f"megatron_magi: {said}", flush=True)
    return result


def refuse_arguments(args: Any) -> None:
    """Stop with one line for the first argument that does not work.

    Raises:
        SystemExit: with what is required, what came and what to do.
    """
    for rule in REFUSALS:
        value = getattr(args, rule.argument, rule.works[0])
        if value not in rule.works:
            raise SystemExit(
                f"--attention-backend magi requires {rule.argument}={rule.works[0]!r}, got "
                f"{value!r} ({rule.flag}); {rule.remedy}"
            )
    _refuse_layers(args)
    _refuse_routers_that_count_rows(args)
    _refuse_pairs_of_stages_over_gloo(args)
    _refuse_absent_transformer_engine(args)


def _refuse_layers(args: Any) -> None:
    """Checked before anything is built, since layers may need packages of their own."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(args, name, None) or ""
        found = [f"{symbol} ({kind})" for symbol, kind in OTHER_LAYERS.items() if symbol in pattern]
        if found:
            raise SystemExit(
                f"--attention-backend magi requires hybrid layers of attention (*), MLP (-) and "
                f"MoE (E), got {', '.join(found)} in {pattern!r}: state or selection along the "
                f"sequence does not follow the plan; leave them out"
            )


def _refuse_routers_that_count_rows(args: Any) -> None:
    """A router would count padding rows, and samples that are joined to one stream."""
    if not getattr(args, "num_experts", None):
        return
    multiple = args.context_parallel_size
    multiple *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    rows = args.seq_length * args.micro_batch_size
    if rows % multiple:
        raise SystemExit(
            f"--attention-backend magi with experts requires a sequence length that "
            f"{multiple} (context parallelism times tensor parallelism under sequence parallelism) "
            f"divides, got {rows} tokens a microbatch: the router would count padding rows; change "
            f"--seq-length"
        )
    kinds = args.moe_router_load_balancing_type
    if args.micro_batch_size > 1 and "seq_aux_loss" in (
        [kinds] if isinstance(kinds, str) else kinds
    ):
        raise SystemExit(
            f"--attention-backend magi requires --micro-batch-size 1 beside seq_aux_loss, got "
            f"{args.micro_batch_size}: samples are joined to one stream; set 1 or use aux_loss"
        )


def change_settings(args: Any) -> str:
    """Set what our plan needs, and return what to tell the user."""
    args.create_attention_mask_in_dataloader = False
    if args.calculate_per_token_loss:
        return ""
    args.calculate_per_token_loss = True
    return "--calculate-per-token-loss is set: ranks hold different numbers of counted tokens"


@contextmanager
def any_seq_length(args: Any) -> Iterator[None]:
    """Let Megatron validate with the next length that its own slicing could divide.

    Megatron asserts that 2 * cp divides the length. Only that assertion and the one on
    max_position_embeddings read it, and the length is restored after them.
    """
    multiple = 2 * args.context_parallel_size
    length, positions = args.seq_length, args.max_position_embeddings
    if length is None or length % multiple == 0:
        yield
        return
    args.seq_length = math.ceil(length / multiple) * multiple
    if positions is not None and positions >= length:
        args.max_position_embeddings = max(positions, args.seq_length)
    yield
    args.seq_length = args.encoder_seq_length = length
    args.max_position_embeddings = positions


def _refuse_pairs_of_stages_over_gloo(args: Any) -> None:
    """0.17 pairs the messages of two pipeline stages wrongly, with and without our switch."""
    virtual = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    pair = args.pipeline_model_parallel_size == 2 and virtual
    over_gloo = getattr(args, "distributed_backend", "nccl") == "gloo"
    if MEGATRON_VERSION[:2] == (0, 17) and pair and over_gloo:
        raise SystemExit(
            f"two pipeline stages with virtual stages over gloo require Megatron-LM 0.18 or later, "
            f"got {MEGATRON_VERSION}, which trains on other activations there without an error; "
            f"leave --num-layers-per-virtual-pipeline-stage out"
        )


def _refuse_absent_transformer_engine(args: Any) -> None:
    if args.transformer_impl == "inference_optimized":
        raise SystemExit(
            "--attention-backend magi requires --transformer-impl local or transformer_engine, got "
            "inference_optimized; choose one of them"
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    module = (getattr(args, "spec", None) or [""])[0]
    if module.endswith(HYBRID_SPECS):
        raise SystemExit(
            f"--spec {module} requires TransformerEngine, got none; install it or pass --spec "
            f"megatron_magi.adapter.hybrid_spec hybrid_local_spec"
        )
    if args.transformer_impl == "transformer_engine":
        raise SystemExit(
            "--transformer-impl transformer_engine requires TransformerEngine, got none; install "
            "it or pass --transformer-impl local"
        )
