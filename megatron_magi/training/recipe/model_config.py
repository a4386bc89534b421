"""The shape of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, SwiGLU, rotary positions, grouped query heads, no biases."""

    num_layers: int = 4
    """Decoder layers of the whole model, over all pipeline stages."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int = 352
    """Width of the gated MLP (each of gate and up)."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int = 2
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    vocab_size: int = 257
    """Token ids in use, before padding. 257 is the built-in byte tokenizer with its EOD."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; independent of tp, so layouts agree."""
    rotary_base: int = 10000
    """Base of the rotary frequencies: 10000 in Llama 2, 500000 in Llama 3."""
    rope_scaling: bool = False
    """Llama-3.1's long-context frequency scaling."""
    rope_scaling_factor: float = 8.0
    """Factor of rope_scaling: 8 in Llama-3.1, 32 in Llama-3.2."""
    norm_epsilon: float = 1e-5
    """The epsilon that is added to the mean square in every RMSNorm."""
    tie_embeddings: bool = True
    """Use the input embedding as the output matrix too."""
    init_std: float = 0.02
    """Standard deviation of new weights; that of projections into the residual stream is
    init_std / sqrt(2 * num_layers)."""
    fused: Literal["auto", "off"] = "auto"
    """"auto": one kernel for what Megatron's local layers do in several, where this machine can.
    "off": Megatron's own operations alone."""

    @property
    def kv_channels(self) -> int:
        """Head dimension in use."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
