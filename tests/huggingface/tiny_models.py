"""Small models of Transformers with random weights, equal for every attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LAYERS = ["sliding_attention", "full_attention"]
WINDOW = 7


def config(name: str, **changes: Any) -> Any:
    """The configuration of a family, with two layers."""
    import transformers

    windows = {"layer_types": LAYERS, "sliding_window": WINDOW}
    families = {
        "llama": ("LlamaConfig", {}),
        "qwen3": ("Qwen3Config", {}),
        "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
        "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, **windows}),
        "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 12, **windows}),
        "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 12, **windows}),
    }
    cls, own = families[name]
    return getattr(transformers, cls)(**{**SHAPE, **own, **changes})


def build(made: Any, attention: str, seed: int = 3) -> Any:
    """A model in fp32 whose weights depend on the seed alone."""
    from transformers import AutoModelForCausalLM

    from megatron_magi.huggingface import register

    register()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(made), attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():  # large enough that attention has something to say
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.train()


def tokens(*shape: int, seed: int = 5) -> Tensor:
    """Random tokens."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def positions(*lengths: int) -> Tensor:
    """int64 [1, sum of lengths]: from 0 in every document."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def gradients(model: Any) -> list[Tensor]:
    """Of all parameters that have one."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def loss_step(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """(logits, gradients) of a loss over all logits that is not flat."""
    logits = model(**inputs).logits
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).square().mean().backward()
    return logits.detach(), gradients(model)
