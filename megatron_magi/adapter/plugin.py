"""Activation: prepare a built model, check that magi's attention runs, and print one line."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_magi.adapter.carried_plan import check_rows
from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.graphs import captures_attention
from megatron_magi.adapter.loss import check_loss_config
from megatron_magi.adapter.max_logit import check_max_logits
from megatron_magi.adapter.mla import prepare_mla_layers
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.adapter.model_shape import LATENT_LAYERS, head_shape
from megatron_magi.adapter.mtp import check_mtp, install_mtp
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.adapter.pipeline_agreement import open_pipeline_agreement
from megatron_magi.adapter.plain_plan import plain_plan
from megatron_magi.adapter.rope import RowPositions, rotary_of_rows
from megatron_magi.adapter.state_layers import attach_state_layers, sign_of, state_layers
from megatron_magi.adapter.state_settings import wrong_state_settings
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm.transport_choice import transport_for
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.select import select_backend
from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.agreement.comparison import agree

ATTENTION_KINDS = ("*", "+")
"""Megatron's signs of plain and of multi-latent attention in a hybrid model's pattern."""


def attach(model: Any, magi_config: MagiConfig | None = None, seq_length: int | None = None) -> str:
    """Prepare a GPTModel (or a list of model chunks, DDP-wrapped or not) for magi's batches.

    It replaces rotary embeddings by ones that follow the plan's positions, checks the loss settings
    and that every self-attention runs magi's core attention, and prints one line on rank 0:
    kernel backend, transport, cp size, chunk and balance (of a causal stream of seq_length tokens;
    default: the model's max_sequence_length). From then on the model refuses rows that were not
    dispatched by the plan that comes with them. All ranks of one model must call it, because it
    opens the comparison of plans between them.

    Returns:
        The start-up line.

    Raises:
        RuntimeError: some layer runs another core attention.
        ValueError: a setting under which context parallelism changes the gradient.
        NotImplementedError: a feature that does not work with context parallelism here.
    """
    chunks = list(model_chunks(model))
    magi_config = magi_config or MagiConfig()
    prepare_model(chunks, magi_config)
    open_pipeline_agreement(magi_config.agreement_timeout_s)
    length = seq_length or chunks[0].max_sequence_length
    line = startup_line(get_model_config(chunks[0]), magi_config, length)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(line, flush=True)
    return line


def prepare_model(model: Any, magi_config: MagiConfig) -> None:
    """Do what `attach` does to the model, for one model chunk or a list, without communication.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as `attach`.
    """
    chunks = list(model_chunks(model))
    assert_active(chunks)
    config = get_model_config(chunks[0])
    check_loss_config(config)
    for chunk in chunks:
        _note_latent_layers(chunk, config)
        _check_features(chunk, config)
        _check_state_layers(chunk, config)
    if getattr(config, "mtp_num_layers", None):
        install_mtp()
    for chunk in chunks:
        _attach_chunk(chunk, magi_config)
    check_max_logits(config, magi_config, config.params_dtype, _device())


def _note_latent_layers(chunk: Any, config: Any) -> None:
    """A hybrid model with multi_latent_attention has MLA layers (+) or plain ones (*), never both,
    and a pipeline stage without either must plan as the others do."""
    pattern = getattr(chunk, "hybrid_layer_pattern", None)
    if pattern is not None and config.multi_latent_attention:
        setattr(config, LATENT_LAYERS, "+" in pattern)


def _attach_chunk(chunk: Any, magi_config: MagiConfig) -> None:
    """Let positions follow the plan, check the rows of each forward, and mark each core attention
    as attached."""
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is not None:
        chunk.rotary_pos_emb = rotary_of_rows(rotary)
    prepare_mla_layers(chunk)
    attach_state_layers(chunk)
    if not getattr(chunk, "is_magi_attached", False):
        chunk.is_magi_attached = True
        chunk.register_forward_pre_hook(check_rows, with_kwargs=True)
        chunk.register_forward_pre_hook(_check_rotary)
    for module in chunk.modules():
        if isinstance(module, MagiCoreAttention):
            module.attach(magi_config)


def _check_rotary(chunk: Any, args: Any) -> None:
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is not None and not isinstance(rotary, RowPositions):
        raise RuntimeError(
            f"the model's rotary embedding must be the one that attach() put there, got "
            f"{type(rotary).__name__}; call attach(model) after the last change of the model"
        )


def _check_state_layers(chunk: Any, config: Any) -> None:
    signs = "".join(sign_of(layer) or "" for _, layer in state_layers(chunk))
    wrong = wrong_state_settings(config, signs)
    if wrong:
        raise NotImplementedError("; ".join(wrong))


def assert_active(model: Any) -> None:
    """Raise RuntimeError (one line) unless every self-attention layer runs magi's."""
    others = []
    for chunk in model_chunks(model):
        found = 0
        for name, module in chunk.named_modules():
            if getattr(module, "attention_type", None) != "self" or not hasattr(
                module, "core_attention"
            ):
                continue
            found += 1
            if not isinstance(module.core_attention, MagiCoreAttention):
                others.append(f"{name} ({type(module.core_attention).__name__})")
        if not found and _expects_attention(chunk):
            others.append("no self-attention at all")
    if others:
        raise RuntimeError(
            f"megatron_magi is not active: every self-attention must run MagiCoreAttention, got "
            f"{len(others)} other: {others[0]}; build the model from with_magi_attention(spec)"
        )


def _expects_attention(chunk: Any) -> bool:
    """True if a model chunk should hold attention; a pipeline stage of a hybrid model may not."""
    decoder = getattr(chunk, "decoder", None)
    kinds = getattr(decoder, "layer_type_list", ATTENTION_KINDS)
    return len(getattr(decoder, "layers", ())) > 0 and any(
        kind in kinds for kind in ATTENTION_KINDS
    )


def startup_line(model_config: Any, magi_config: MagiConfig, seq_length: int) -> str:
    """One line that says what will run, equal on every rank; all ranks call it."""
    cp_size = model_config.context_parallel_size
    heads = head_shape(model_config)
    backend = select_backend(
        magi_config.kernel_backend,
        _device(),
        model_config.params_dtype,
        HeadDims(heads.head_dim, heads.value_dim),
    )
    plan = _causal_plan(model_config, magi_config, seq_length)
    transport = _transport(plan, torch.empty(0, dtype=model_config.params_dtype, device=_device()))
    return (
        f"megatron_magi active: kernel {backend.name}, transport {transport}, cp {cp_size}, "
        f"heads {heads}, "
        f"chunk {plan.layout.chunk_size}, imbalance {plan.imbalance:.3f} "
        f"(causal, {seq_length} tokens)"
    )


def _causal_plan(model_config: Any, magi_config: MagiConfig, seq_length: int) -> AttnPlan:
    cp_size = model_config.context_parallel_size
    if captures_attention(model_config):
        return plain_plan(seq_length // cp_size, 1, False, model_config, magi_config)
    group = _cp_group(cp_size)
    return make_packed_seq_params(
        [0, seq_length], model_config, group, magi_config=magi_config, device="cpu"
    ).token_plan


def _transport(plan: AttnPlan, like: torch.Tensor) -> str:
    """The name of what will move rows of this kind; the ranks of a context-parallel group choose it
    here, together."""
    if plan.cp_size == 1:
        return "none"
    group = parallel_state.get_context_parallel_group()
    agree(plan, group)
    return transport_for(plan, group, like).name


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cp_group(cp_size: int) -> Any:
    return parallel_state.get_context_parallel_group() if cp_size > 1 else None


def _check_features(chunk: Any, config: Any) -> None:
    if (
        config.virtual_pipeline_model_parallel_size
        and config.pipeline_model_parallel_size == 2
        and not config.overlap_p2p_comm
    ):
        # Both neighbours of a pipeline stage are then the same rank, and Megatron's batched sends
        # and receives pair up wrongly: there is no error, but the losses differ (0.16.1, gloo).
        raise ValueError(
            "two pipeline stages with virtual stages require overlap_p2p_comm=True and "
            "batch_p2p_comm=False, got overlap_p2p_comm=False; set both, or use more stages"
        )
    if getattr(config, "mtp_num_layers", None):
        check_mtp(config)
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is not None:
        rotary_of_rows(rotary)  # here, before anything is changed
