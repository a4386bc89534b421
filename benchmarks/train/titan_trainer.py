"""torchtitan's own trainer on packed documents, without its loader, checkpoints and log files.

Importing this module imports torchtitan.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from benchmarks.lib.packed import Packed
from examples.torchtitan.magi import DispatchedDocuments, with_magi

BALANCERS = {"headtail": "headtail", "ptrr": "ptrr", "unbalanced": None}
"""torchtitan's names of its load balancers for FlexAttention, by way to attend."""
WAYS = ("ours", *BALANCERS)
LEARNING_RATE = 5e-5
"""Small, so that rounding in one way to attend does not grow into another loss."""
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Size:
    """One of torchtitan's sizes of Llama, with another vocabulary and perhaps fewer layers."""

    flavor: str
    num_layers: int
    vocab: int
    dtype: str
    """In which layers compute; weights, reductions and the optimizer are in fp32."""

    @classmethod
    def on(cls, device: str) -> Size:
        """About a billion weights; on the CPU a small one, to try the program."""
        if device == "cuda":
            return cls("1B", 16, 32768, "bfloat16")
        return cls("debugmodel", 2, 2048, "float32")

    def model_spec(self, attention: str) -> Any:
        """torchtitan's model with this attention of its own."""
        spec = model_registry(self.flavor, attn_backend=attention)
        spec.model.layers = spec.model.layers[: self.num_layers]
        spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = self.vocab
        spec.model.lm_head.out_features = self.vocab
        return spec


def configuration(way: str, size: Size, length: int, cp_size: int) -> Any:
    """torchtitan's, with no torch.compile but that of FlexAttention, and nothing recomputed."""
    made = Trainer.Config(
        model_spec=size.model_spec("varlen" if way == "ours" else "flex"),
        optimizer=default_adamw(lr=LEARNING_RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=WARMUP_STEPS),
        loss=CrossEntropyLoss.Config(global_vocab_size=size.vocab),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=length,
            max_context_length=length,
            mixed_precision_param=size.dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            context_parallel_degree=cp_size,
            context_parallel_load_balancer=BALANCERS.get(way),
            spmd_backend="spmd_types",
        ),
        activation_checkpoint=None,
    )
    return with_magi(made) if way == "ours" else made


def dims_of(parallelism: ParallelismConfig, num_ranks: int, device: str) -> ParallelDims:
    """The meshes of this many ranks; all runs of a process may share them."""
    parallel_dims.device_type = device
    utils.set_spmd_backend(parallelism.spmd_backend)
    return ParallelDims.from_config(parallelism, num_ranks)


def compile_without_autotuning() -> None:
    """FlexAttention in its default tiles, as torchtitan has it where it must be deterministic, and
    its block mask by PyTorch's function as it is: with torch 2.11, ptxas was not done with the
    compiled one after five minutes."""
    from torch.nn.attention.flex_attention import flex_attention

    kept = {**FlexAttention.inductor_configs}
    kept |= {"max_autotune": False, "coordinate_descent_tuning": False}
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=kept)
    attention._compiled_create_block_mask = attention.create_block_mask


def sharded_model(config: Any, dims: ParallelDims, device: str) -> Any:
    """The model with weights that depend on its size alone, spread as torchtitan does.

    ``parallelize_llama`` hands FSDP a mesh of several axes, which it takes in nightly builds of
    torch only; here it has those axes as one.
    """
    torch.manual_seed(3)
    with torch.device(device):
        model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights()
    model.parallelize(dims)
    training = config.training
    apply_fsdp_to_decoder(
        model, dims.get_mesh("loss" if dims.cp_enabled else "dp_shard"), pp_enabled=False,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )  # fmt: skip
    for module in model.modules():
        if device == "cpu" and isinstance(module, FSDPModule):  # gloo has no product with a number
            module.set_force_sum_reduction_for_comms(True)
    return model.train()


class Losses:
    """What torchtitan's step reports to, in place of its metrics."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, average_loss: float, *others: Any, **more: Any) -> None:
        self.seen.append(average_loss)


class Run:
    """A model in training on one way to attend."""

    def __init__(self, config: Any, dims: ParallelDims, device: str) -> None:
        """``dims``: see dims_of."""
        made = bare_trainer(config, dims, device)
        made.model_parts = [sharded_model(config, dims, device)]
        made.optimizers = config.optimizer.build(model_parts=made.model_parts)
        made.lr_schedulers = config.lr_scheduler.build(
            optimizers=made.optimizers, training_steps=config.training.steps
        )
        made.metrics_processor = self._losses = Losses()
        made.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
        made.gradient_accumulation_steps = made.num_pp_microbatches = 1
        self._trainer = made
        self._process = made.post_dataloading_process
        made.post_dataloading_process = self._watched
        self._masks: Any = None

    def _watched(self, input_dict: Any, labels: Any) -> Any:
        made = self._process(input_dict, labels)
        self._masks = made[2]["attention_masks"]
        return made

    def step(self, sample: Packed) -> None:
        """torchtitan's step: forward, backward, clipping, AdamW, and the sum of the loss."""
        inputs = {"input": sample.tokens, "positions": sample.positions}
        self._trainer.step += 1
        self._trainer.train_step(itertools.repeat((inputs, sample.labels)))

    @property
    def vocab(self) -> int:
        return self._trainer.model_config.vocab_size

    @property
    def losses(self) -> list[float]:
        """Of every step, the mean over all tokens."""
        return self._losses.seen

    @property
    def rows(self) -> tuple[list[int], int]:
        """(key rows that each rank received in a layer's forward, rows of padding) of the last
        step."""
        if isinstance(self._masks, DispatchedDocuments):
            plan = self._masks.plan
            padding = plan.layout.num_local_tokens * plan.cp_size - plan.layout.total_seqlen
            return plan.rows_received.tolist(), padding
        num_queries, num_keys = self._masks.seq_lengths
        num_ranks = dist.get_world_size()
        return [num_keys - num_queries] * num_ranks, num_queries * num_ranks - num_keys


def bare_trainer(config: Any, dims: ParallelDims, device: str) -> Any:
    """torchtitan's trainer after its start, without a model and what needs a GPU or files."""
    made = object.__new__(type(config)._owner)
    made.config, made.ntokens_seen, made.step = config, 0, 0
    made.parallel_dims = dims
    made.model_config = config.model_spec.model
    made.model_config.update_from_config(config=config)
    made.device = torch.device(device)
    made.loss_fn = config.loss.build(compile_config=config.compile)
    made.train_context = utils.get_spmd_context(parallel_dims=dims)
    made.fwd_bwd_fn = made._forward_backward_body
    return made
