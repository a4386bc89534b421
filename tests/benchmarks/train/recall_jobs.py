"""Functions that layout_worker runs on every rank of a world, for test_recall_weights.py."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.train import flag_masks, recall_corpus, recall_counts, recall_weights
from megatron_magi.adapter import layer_spec, packed, plugin, rank_batch
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.documents import MaskRequest
from tests.adapter.dense_batch import dense_batch

DOCUMENT, EOD = 1024, 2047


def recalled(mask: str, attention: str = "magi", bf16: bool = False) -> dict[str, float]:
    """What a validation of two small documents counts, with this mask of flag_masks.py."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    config = model_config(bf16)
    recall_weights.install()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec.llama_layer_spec(config, attention=attention),  # type: ignore[arg-type]
        vocab_size=EOD + 1,
        max_sequence_length=2 * DOCUMENT,
        position_embedding_type="rope",
        rotary_percent=recall_weights.MODEL["rotary-percent"],
        share_embeddings_and_output_weights=False,
    )
    bounds = [0, DOCUMENT, 2 * DOCUMENT]
    if attention == "magi":
        made = getattr(flag_masks, mask)(MaskRequest(tuple(bounds), None))
        magi = MagiConfig(chunk_size=128)
        plugin.attach(model, magi, 2 * DOCUMENT)
        group = parallel_state.get_context_parallel_group()
        # The mask alone has the error: positions begin anew with every document.
        params = packed.make_packed_seq_params(bounds, config, group, magi_config=magi, mask=made)
        batch: Any = rank_batch.dispatch_batch(rows(), params, group)
    else:
        batch = dense_batch(rows(), bounds)
    record = recall_counts.RecalledTokens(DOCUMENT)
    with torch.no_grad():
        inputs = batch.model_inputs()
        record.add(model(**inputs), inputs["position_ids"])
    with tempfile.TemporaryDirectory() as folder:
        record.write(Path(folder), 1)
        dist.barrier()
        if dist.get_rank():
            return {}
        return dataclasses.asdict(recall_counts.read_counts(Path(folder)))


def rows() -> rank_batch.Batch:
    """Two documents with the tokens that end them."""
    rng = np.random.default_rng(3)
    one, two = (recall_corpus.document(DOCUMENT, rng, EOD) for _ in range(2))
    tokens = np.concatenate([one, [EOD], two, [EOD, 0]])
    positions = np.tile(np.arange(DOCUMENT), 2)
    ones = np.ones(2 * DOCUMENT, dtype=np.float32)
    parts = (tokens[:-1], tokens[1:], ones, positions)
    return rank_batch.Batch(*(torch.from_numpy(part)[None] for part in parts))


def model_config(bf16: bool) -> TransformerConfig:
    """The model that recall_weights.MODEL's flags ask for."""
    flags = recall_weights.MODEL
    return TransformerConfig(
        num_layers=flags["num-layers"],
        hidden_size=flags["hidden-size"],
        num_attention_heads=flags["num-attention-heads"],
        num_query_groups=flags["num-query-groups"],
        kv_channels=flags["kv-channels"],
        ffn_hidden_size=flags["ffn-hidden-size"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=dist.get_world_size(),
        calculate_per_token_loss=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
