"""A pretrain script for the megatron-core wheel (0.19), which has megatron.training but no scripts.

It calls the functions that pretrain_gpt.py of Megatron-LM calls, in its order, and nothing of
megatron_magi. With a checkout of Megatron-LM, use that one.

    torchrun --nproc-per-node 2 -m megatron_magi.run pretrain_gpt --recipe tiny_llama_cpu \\
        --mock-data --attention-backend magi --context-parallel-size 2

`pretrain_gpt` without .py is the packaged copy of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, inprocess_restart, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

KEYS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "max_seqlen")
KEYS += ("position_ids", "tokens")


def get_batch(iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """Returns this rank's part of a microbatch; empty entries on a middle pipeline stage."""
    args = get_args()
    packed = args.dataloader_inter_document_masking
    outer = is_first_or_last_pipeline_stage(vp_stage)
    if not outer and not packed:
        return dict.fromkeys(KEYS)
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(iterator)
        batch = {k: sample[k].cuda() if sample.get(k) is not None else None for k in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not outer:
        return batch
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=packed,
    )


def forward_step(iterator: Any, model: Any) -> Any:
    """Returns the losses of a microbatch, and the function that sums them."""
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    documents = batch["cu_seqlens"]
    params = None
    if documents is not None:
        longest = int(batch["max_seqlen"].item())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=documents[0],
            cu_seqlens_kv=documents[0],
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    return losses, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    """Returns the sum of the losses, the number of tokens, and what Megatron reports."""
    weights = loss_mask.reshape(-1).float()
    loss = (output.reshape(-1).float() * weights).sum()
    count = weights.sum()
    return loss, count.int(), {"lm loss": torch.stack([loss.detach(), count])}


def datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Returns the datasets of training, validation and test."""
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, config).build()


def is_built_here(vp_stage: int | None = None) -> bool:
    """Returns True on the rank of a tensor-parallel group that reads samples."""
    return mpu.get_tensor_model_parallel_rank() == 0


def main(add_arguments: Callable[[Any], Any] | None = None) -> None:
    """Trains as the command line says.

    Args:
        add_arguments: adds flags of a script of your own to Megatron's parser.
    """
    datasets.is_distributed = True  # type: ignore[attr-defined]
    train, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    arguments = parse_and_validate_args(extra_args_provider=add_arguments)
    model = gpt_config_from_args(arguments)
    train(
        pretrain_cfg_container_from_args(arguments, model),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
    )


if __name__ == "__main__":
    main()
