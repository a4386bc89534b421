"""Estimates the memory of a rank of a run, by part, in bytes.

Counted from the modules that run: Megatron's local layers with our core attention or a baseline's,
with the fused parts (adapter/fused/parts.py) or without. Not counted: the CUDA context, NCCL's
buffers, kernel workspace, fragmentation, and what exists only inside one operation.

T tokens of a rank, h hidden size, F gated MLP width, H query heads, G key/value heads, D head_dim,
V padded vocabulary; H, G, F and V divided by the tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magi.core.plan import AttnPlan, most_buffered_rows
from megatron_magi.training.estimate.flops import rank_parameters
from megatron_magi.training.recipe.run_config import RunConfig

MASKS_KEPT = 8
"""Number of masks that the baselines keep, so as not to build them again for every layer."""


@dataclass(frozen=True)
class Fused:
    """Which fused operations run: they keep less. The defaults are those of CUDA."""

    norms: bool = True
    """torch's RMSNorm; the CPU's keeps fp32 copies."""
    parts: bool = True
    """Those of adapter/fused/parts.py, if model.fused is "auto"."""


ON_CUDA = Fused()


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    """Megatron's fp32 gradient buffer."""
    optimizer: int
    """Adam's moments, and fp32 main weights of a bf16 model."""
    activations: int
    """Peak of what the backward pass needs of all microbatches in flight."""
    output_workspace: int
    """Logits or their weight's gradient, on the last pipeline stage, beside what is kept."""
    receive_buffers: int
    """Keys, values and their gradients that one layer's attention exchanges."""
    attention_workspace: int
    """Gradient sums of a layer's own queries, keys and values in fp32."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def rank_memory(
    config: RunConfig, plan: AttnPlan | None, dp: int, stage: int, fused: Fused = ON_CUDA
) -> RankMemory:
    """Memory of a rank of pipeline stage `stage`, the largest in its context-parallel group.

    Args:
        plan: of a typical microbatch; None for a baseline.
        dp: data-parallel size.
        fused: the fused operations, by default those of CUDA.
    """
    parameters = sum(rank_parameters(config, stage).values())
    element = _element(config)
    moments = (8 if config.train.dtype == "fp32" else 12) * parameters
    shards = dp * config.parallel.cp if config.parallel.distributed_optimizer else 1
    tokens = config.data.seq_length if plan is None else plan.layout.num_local_tokens
    last = stage == config.parallel.pp - 1
    return RankMemory(
        weights=element * parameters,
        gradients=4 * parameters,
        optimizer=moments // shards,
        activations=activation_bytes(config, tokens, dp, stage, fused),
        output_workspace=_output_workspace(config, tokens, fused) if last else 0,
        receive_buffers=0
        if plan is None
        else receive_bytes(config, plan) + kept_key_bytes(config, plan, dp, stage),
        attention_workspace=4 * tokens * _qkv_elements(config, plan),
    )


def activation_bytes(
    config: RunConfig, tokens: int, dp: int, stage: int, fused: Fused = ON_CUDA
) -> int:
    """Peak bytes that are kept for the backward pass in Megatron's schedule."""
    p = config.parallel
    layers = config.model.num_layers // (p.pp * (p.vpp or 1))
    per_layer = layer_bytes(config, tokens, fused)
    in_flight = chunks_in_flight(config, dp, stage)
    if config.train.recompute == "full":
        kept = in_flight * layers * _rows(config, tokens) * config.model.hidden_size
        kept *= _element(config)
        kept += per_layer  # the layer that is being computed again
    else:
        kept = in_flight * layers * per_layer
    kept += in_flight * shared_bytes(config, tokens, fused)
    # "sdpa" keeps boolean masks, one per microbatch.
    masks = min(MASKS_KEPT, config.train.global_batch_size * config.train.iterations)
    kept += masks * tokens * _mask_columns(config, tokens)
    return kept + (head_bytes(config, tokens, fused) if stage == p.pp - 1 else 0)


def layer_bytes(config: RunConfig, tokens: int, fused: Fused = ON_CUDA) -> int:
    """Bytes that one layer keeps of one microbatch.

    Norms: input and output of both, as rows of the residual stream. SwiGLU: both halves, the
    activated gate, the shifted other half, their product; fused, the halves and the product.
    """
    m, tp = config.model, config.parallel.tp
    mlp = tokens * (3 if _has_parts(config, fused) else 5) * m.ffn_hidden_size // tp
    heads = m.num_attention_heads // tp
    lse = 0 if config.train.recompute == "attention" else 4 * tokens * heads
    norms = 2 * _norm_bytes(config, tokens, fused)
    return norms + (_attention_elements(config, tokens, fused) + mlp) * _element(config) + lse


def shared_bytes(config: RunConfig, tokens: int, fused: Fused = ON_CUDA) -> int:
    """Bytes that all layers keep once of one microbatch: the fused RoPE's fp32 angles."""
    return 4 * tokens * config.model.kv_channels if _has_parts(config, fused) else 0


def head_bytes(config: RunConfig, tokens: int, fused: Fused = ON_CUDA) -> int:
    """Bytes kept after the last layer: the final norm's rows, and a number per token and word.

    That number is the fp32 probability; fused, the projected logit, which becomes its gradient.
    """
    element = _element(config) if _has_parts(config, fused) else 4
    words = config.model.padded_vocab_size // config.parallel.tp
    return _norm_bytes(config, tokens, fused) + element * tokens * words


def chunks_in_flight(config: RunConfig, dp: int, stage: int) -> int:
    """Microbatches, times model chunks, whose activations a stage holds at once (1F1B)."""
    p = config.parallel
    microbatches = config.train.global_batch_size // dp
    if p.vpp is None:
        return min(p.pp - stage, microbatches)
    warmup = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp
    return min(warmup + 1, microbatches * p.vpp)


def receive_bytes(config: RunConfig, plan: AttnPlan) -> int:
    """Largest buffers of a rank for one layer: keys and values of two stages, gradients of all."""
    element = _element(config)
    on_wire = 4 if config.magi.dkv_reduce_in_fp32 else element
    row = plan.head_shape.kv_row_elements
    worst = 0
    for rank in range(plan.cp_size):
        view = plan.rank_plan(rank)
        own, *remote = view.stages
        received = sum(s.cast.num_recv for s in view.stages if s.cast is not None)
        backward = element * most_buffered_rows([*remote, own]) + on_wire * received
        worst = max(worst, row * max(backward, element * most_buffered_rows(view.forward_stages)))
    return worst


def kept_key_bytes(config: RunConfig, plan: AttnPlan, dp: int, stage: int) -> int:
    """Received keys and values that a rank's layers keep for their backward, where they are kept.

    Where activations are recomputed, one layer at a time has them.
    """
    if not config.magi.keep_received_keys:
        return 0
    views = [plan.rank_plan(rank).forward_stages for rank in range(plan.cp_size)]
    rows = max(sum(s.num_keys for s in stages if s.cast is not None) for stages in views)
    p, is_recomputed = config.parallel, config.train.recompute in ("full", "attention")
    layers = config.model.num_layers // (p.pp * (p.vpp or 1))
    at_once = 1 if is_recomputed else layers * chunks_in_flight(config, dp, stage)
    return at_once * rows * plan.head_shape.kv_row_elements * _element(config)


def _element(config: RunConfig) -> int:
    return 4 if config.train.dtype == "fp32" else 2


def _has_parts(config: RunConfig, fused: Fused) -> bool:
    return fused.parts and config.model.fused == "auto"


def _attention_elements(config: RunConfig, tokens: int, fused: Fused) -> int:
    """Bytes kept for a layer's attention: query, key and value, the output, cosines and sines.

    Ours keeps q, k and v, and so does any with fused parts. Another one, unfused, keeps the QKV
    projection (v is a view of it) beside q and k after RoPE, and so does the recomputation of
    attention alone, which keeps what attention is given. "dense" keeps all probabilities too.
    "sdpa" keeps q, and keys and values repeated for every query head in place of k and v, and where
    there are documents the mask as numbers.
    """
    m, tp = config.model, config.parallel.tp
    heads, groups, d = m.num_attention_heads // tp, m.num_query_groups // tp, m.kv_channels
    has_parts = _has_parts(config, fused)
    angles = 0 if has_parts else 4 * tokens * d
    if config.attention == "sdpa":
        return angles + tokens * (4 * heads * d + _mask_columns(config, tokens))
    probabilities = tokens * tokens * heads if config.attention == "dense" else 0
    is_copied = config.attention == "magi" and config.train.recompute != "attention"
    rotated = 0 if has_parts or is_copied else heads + groups
    return angles + probabilities + tokens * (_qkv_width(config) + (heads + rotated) * d)


def _norm_bytes(config: RunConfig, tokens: int, fused: Fused) -> int:
    """A norm's input and output; unfused, fp32 input and normalized rows, and the output."""
    element = _element(config)
    kept = element + (element if fused.norms else 8)
    return _rows(config, tokens) * config.model.hidden_size * kept


def _mask_columns(config: RunConfig, tokens: int) -> int:
    """Keys in a row of the explicit mask of "sdpa"; 0 for a causal sample, which has no mask."""
    has_mask = config.attention == "sdpa" and config.data.mask == "document"
    return tokens if has_mask else 0


def _rows(config: RunConfig, tokens: int) -> int:
    """Rows of the residual stream on a rank."""
    return tokens // config.parallel.tp if config.parallel.sequence_parallel else tokens


def _qkv_elements(config: RunConfig, plan: AttnPlan | None) -> int:
    """HeadDims of a row's query, key and value; by the plan, values may differ from keys."""
    if plan is None:
        return _qkv_width(config)
    heads = plan.head_shape
    return heads.num_heads_q * heads.head_dim + heads.kv_row_elements


def _qkv_width(config: RunConfig) -> int:
    m, tp = config.model, config.parallel.tp
    return (m.num_attention_heads + 2 * m.num_query_groups) // tp * m.kv_channels


def _output_workspace(config: RunConfig, tokens: int, fused: Fused) -> int:
    """Bytes beside what the output head keeps, at the larger of two moments.

    The first is the loss: bf16 logits beside their fp32 copy (fp32 logits become the probabilities
    in place). The second comes after the probabilities are replaced by the logits' gradient: the
    gradient of the projection's weight, before it is added to the buffer. Fused, the first needs
    nothing, and in the second Megatron makes an unused gradient of that size for autograd.
    """
    m, tp, element = config.model, config.parallel.tp, _element(config)
    logits = tokens * m.padded_vocab_size // tp
    weight = m.hidden_size * m.padded_vocab_size // tp
    if _has_parts(config, fused):
        return element * weight
    at_loss = 0 if element == 4 else element * logits
    return max(at_loss, element * (logits + weight) - 4 * logits)
