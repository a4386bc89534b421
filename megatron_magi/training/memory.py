"""What a rank of a run will hold in memory, by part, in bytes.

Counted from the modules that run (see adapter/layer_spec.py): unfused SwiGLU, our core attention,
Megatron's vocabulary-parallel cross-entropy. Not counted: the CUDA context, NCCL's buffers, kernel
workspace, fragmentation, and what lives for a moment inside one operation.

T tokens of a rank, h hidden size, F gated MLP width, H query heads, G key/value heads, D head_dim,
V padded vocabulary; H, G, F and V divided by the tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magi.core.plan import AttnPlan, most_buffered_rows
from megatron_magi.training.config import RunConfig
from megatron_magi.training.parameters import rank_parameters


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    """Megatron's fp32 gradient buffer."""
    optimizer: int
    """Adam's moments, and fp32 main weights of a bf16 model."""
    activations: int
    """What the backward pass needs of all microbatches in flight, at the fullest moment."""
    output_workspace: int
    """Logits or their weight's gradient, on the last pipeline stage, beside the probabilities."""
    receive_buffers: int
    """Keys, values and their gradients that travel for one layer's attention."""
    attention_workspace: int
    """Gradient sums of a layer's own queries, keys and values in fp32."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def rank_memory(
    config: RunConfig, plan: AttnPlan | None, dp: int, stage: int, fused_norms: bool = True
) -> RankMemory:
    """Memory of a rank of pipeline stage `stage`, the fullest of its context-parallel group.

    Args:
        plan: of a typical microbatch; None for the dense reference.
        dp: data-parallel size.
        fused_norms: as on CUDA; torch's CPU norm keeps more.
    """
    parameters = sum(rank_parameters(config, stage).values())
    element = _element(config)
    moments = (8 if config.train.dtype == "fp32" else 12) * parameters
    shards = dp * config.parallel.cp if config.parallel.distributed_optimizer else 1
    tokens = config.data.seq_length if plan is None else plan.dispatch.num_local_tokens
    last = stage == config.parallel.pp - 1
    return RankMemory(
        weights=element * parameters,
        gradients=4 * parameters,
        optimizer=moments // shards,
        activations=activation_bytes(config, tokens, dp, stage, fused_norms),
        output_workspace=_output_workspace(config, tokens) if last else 0,
        receive_buffers=0 if plan is None else receive_bytes(config, plan),
        attention_workspace=4 * tokens * _qkv_elements(config, plan),
    )


def activation_bytes(
    config: RunConfig, tokens: int, dp: int, stage: int, fused_norms: bool = True
) -> int:
    """Bytes kept for the backward pass at the fullest moment of Megatron's schedule."""
    p = config.parallel
    layers = config.model.num_layers // (p.pp * (p.vpp or 1))
    per_layer = layer_bytes(config, tokens, fused_norms)
    in_flight = chunks_in_flight(config, dp, stage)
    if config.train.recompute == "full":
        kept = in_flight * layers * _rows(config, tokens) * config.model.hidden_size
        kept *= _element(config)
        kept += per_layer  # the layer that is being computed again
    else:
        kept = in_flight * layers * per_layer
    return kept + (head_bytes(config, tokens, fused_norms) if stage == p.pp - 1 else 0)


def layer_bytes(config: RunConfig, tokens: int, fused_norms: bool = True) -> int:
    """Bytes that one layer keeps of one microbatch.

    Norms: input and output of both, as rows of the residual stream. Attention: the QKV projection
    (v is a view of it), q and k after RoPE, the output. SwiGLU: both halves, the activated gate,
    the shifted other half, their product. The dense reference keeps all probabilities too.
    """
    m, tp = config.model, config.parallel.tp
    element = _element(config)
    heads, groups = m.num_attention_heads // tp, m.num_query_groups // tp
    attention = tokens * (_qkv_width(config) + (2 * heads + groups) * m.kv_channels)
    if config.attention == "dense":
        attention += tokens * tokens * heads
    mlp = tokens * 5 * m.ffn_hidden_size // tp
    angles = tokens * 4 * m.kv_channels
    lse = 0 if config.train.recompute == "attention" else 4 * tokens * heads
    norms = 2 * _norm_bytes(config, tokens, fused_norms)
    return norms + (attention + mlp + angles) * element + lse


def head_bytes(config: RunConfig, tokens: int, fused_norms: bool = True) -> int:
    """Bytes kept behind the last layer: the final norm's rows, fp32 probabilities per token."""
    probabilities = 4 * tokens * config.model.padded_vocab_size // config.parallel.tp
    return _norm_bytes(config, tokens, fused_norms) + probabilities


def chunks_in_flight(config: RunConfig, dp: int, stage: int) -> int:
    """Microbatches, times model chunks, whose activations a stage holds at once (1F1B)."""
    p = config.parallel
    microbatches = config.train.global_batch_size // dp
    if p.vpp is None:
        return min(p.pp - stage, microbatches)
    warmup = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp
    return min(warmup + 1, microbatches * p.vpp)


def receive_bytes(config: RunConfig, plan: AttnPlan) -> int:
    """Fullest rank's buffers of one layer: keys and values of two stages, gradients of all."""
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


def _element(config: RunConfig) -> int:
    return 4 if config.train.dtype == "fp32" else 2


def _norm_bytes(config: RunConfig, tokens: int, fused: bool) -> int:
    """A norm's input and output; unfused, fp32 input and normalized rows, and the output."""
    element = _element(config)
    return _rows(config, tokens) * config.model.hidden_size * (element + (element if fused else 8))


def _rows(config: RunConfig, tokens: int) -> int:
    """Rows of the residual stream on a rank."""
    return tokens // config.parallel.tp if config.parallel.sequence_parallel else tokens


def _qkv_elements(config: RunConfig, plan: AttnPlan | None) -> int:
    """Of a row's query, key and value; the plan knows values of another width than keys."""
    if plan is None:
        return _qkv_width(config)
    heads = plan.head_shape
    return heads.num_heads_q * heads.head_dim + heads.kv_row_elements


def _qkv_width(config: RunConfig) -> int:
    m, tp = config.model, config.parallel.tp
    return (m.num_attention_heads + 2 * m.num_query_groups) // tp * m.kv_channels


def _output_workspace(config: RunConfig, tokens: int) -> int:
    """Beside the kept probabilities, at the fuller of two moments.

    Loss: bf16 logits beside their fp32 copy (fp32 logits become the probabilities in place). Then,
    probabilities given up for the logits' gradient: the gradient of the projection's weight, which
    exists for a moment before it is added to the buffer.
    """
    m, tp, element = config.model, config.parallel.tp, _element(config)
    logits = tokens * m.padded_vocab_size // tp
    weight = m.hidden_size * m.padded_vocab_size // tp
    at_loss = 0 if element == 4 else element * logits
    return max(at_loss, element * (logits + weight) - 4 * logits)
