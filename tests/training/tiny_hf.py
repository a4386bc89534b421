"""Tiny random HuggingFace Llama folders, and a Llama forward in plain torch from their tensors.

Nothing here is from the package: names, shapes and mathematics are written out once more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A config.json: 4 query heads on 2 key/value heads of 16, wider together than the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 257,
        "rms_norm_eps": 1e-4,
        "rope_theta": 10000.0,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": False,
        **changes,
    }


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a folder with its shape."""
    e, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], e)}
    for layer in range(c["num_hidden_layers"]):
        result |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in [
                ("input_layernorm", (e,)),
                ("self_attn.q_proj", (q, e)),
                ("self_attn.k_proj", (kv, e)),
                ("self_attn.v_proj", (kv, e)),
                ("self_attn.o_proj", (e, q)),
                ("post_attention_layernorm", (e,)),
                ("mlp.gate_proj", (f, e)),
                ("mlp.up_proj", (f, e)),
                ("mlp.down_proj", (e, f)),
            ]
        }
    result["model.norm.weight"] = (e,)
    if not c["tie_word_embeddings"]:
        result["lm_head.weight"] = (c["vocab_size"], e)
    return result


def random_tensors(c: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Weights large enough that attention and positions matter, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.3)
            + (0 if len(shape) == 2 else 1)
        ).to(dtype)
        for name, shape in shapes(c).items()
    }


def write_folder(folder: Path, c: dict[str, Any], tensors: Tensors, files: int = 1) -> Path:
    """config.json and the tensors, dealt out over `files` files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(c))
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    where = {name: names[i % files] for i, name in enumerate(tensors)}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    for file in names:
        save_file({n: tensors[n] for n, f in where.items() if f == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_folder(folder: Path) -> Tensors:
    """Every tensor of every file."""
    from safetensors.torch import load_file

    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def logits(c: dict[str, Any], w: Tensors, tokens_T: Tensor) -> Tensor:
    """[T, vocabulary] of one document, in the dtype of the weights."""
    x = w["model.embed_tokens.weight"][tokens_T]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        x = x + _attention(c, w, p, _norm(c, x, w[f"{p}.input_layernorm.weight"]))
        h = _norm(c, x, w[f"{p}.post_attention_layernorm.weight"])
        gated = F.silu(h @ w[f"{p}.mlp.gate_proj.weight"].T) * (h @ w[f"{p}.mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{p}.mlp.down_proj.weight"].T
    x = _norm(c, x, w["model.norm.weight"])
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return x @ w[head].T


def _norm(c: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]) * weight


def _attention(c: dict[str, Any], w: Tensors, prefix: str, x_TE: Tensor) -> Tensor:
    heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    length = len(x_TE)
    q, k, v = (
        (x_TE @ w[f"{prefix}.self_attn.{n}_proj.weight"].T).view(length, -1, d).transpose(0, 1)
        for n in "qkv"
    )
    angles = torch.arange(length)[:, None] * frequencies(c)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x_TE.dtype) for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    serving = [head // (heads // groups) for head in range(heads)]
    scores = rotate(q) @ rotate(k)[serving].transpose(1, 2) / math.sqrt(d)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    seen = scores.masked_fill(unseen, -math.inf).softmax(-1) @ v[serving]
    return seen.transpose(0, 1).reshape(length, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T


def frequencies(c: dict[str, Any]) -> Tensor:
    """[head_dim / 2], one pair of channels after the other, scaled as Llama-3.1 does."""
    result = []
    for pair in range(c["head_dim"] // 2):
        frequency = c["rope_theta"] ** (-2 * pair / c["head_dim"])
        scaling = c["rope_scaling"]
        if scaling is not None:
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency = kept * frequency + (1 - kept) * frequency / scaling["factor"]
        result.append(frequency)
    return torch.tensor(result)
