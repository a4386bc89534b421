"""Our attention in the place of torchtitan's varlen attention, under context parallelism.

torchtitan gathers all keys and values on every context-parallel rank and refuses varlen attention
there. Here a batch is planned by its documents and dispatched by the plan, and `MagiAttention`
exchanges the rows that a rank needs. Weights, loss and the sum of gradients stay torchtitan's.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import spmd_types as spmd
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import GQAttention, VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig
from torchtitan.trainer import Trainer

import megatron_magi as magi

CAUSAL = (-1, 0)
"""The window of a varlen attention that sees a whole document up to its own token."""


@dataclass(frozen=True)
class DispatchedDocuments:
    """What stands for torchtitan's attention masks: the plan of a batch, and who carries it out."""

    plan: magi.AttnPlan
    cp_mesh: DeviceMesh | None  # None: no context parallelism


class MagiAttention(Module):
    """Inner attention on this rank's tokens; q [T, H, D], k and v [T, G, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        def build(self, **kwargs: Any) -> Module:
            if self.sharding_config is not None:
                self.sharding_config = with_local_keys(self.sharding_config)
            return Module.Config.build(self, **kwargs)

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        attention_masks: DispatchedDocuments,
        scale: float | None = None,
        enable_gqa: bool = False,  # heads are grouped by the shapes
    ) -> Tensor:
        if not isinstance(attention_masks, DispatchedDocuments):
            raise TypeError(
                f"MagiAttention needs attention_masks of MagiTrainer, got "
                f"{type(attention_masks).__name__}; train with MagiTrainer, without a validator"
            )
        plan, cp_mesh = attention_masks.plan, attention_masks.cp_mesh
        with spmd.no_typecheck():
            out, _ = magi.dist_attn(q_TNH, k_TNH, v_TNH, plan, cp_mesh, magi.Softmax(scale))
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_TNH), get_partition_spec(q_TNH))
        return out


def with_local_keys(config: ShardingConfig) -> ShardingConfig:
    """The layout of an inner attention to which keys and values come as they are."""
    local = config.in_src_shardings
    gradients = LocalMapConfig(in_grad_placements=tuple(local.values()))
    return replace(config, in_dst_shardings=local, local_map=gradients)


def plan_documents(positions: Tensor, heads: magi.HeadShape, cp_mesh: DeviceMesh | None):
    """The plan of a packed batch, one stream [tokens]: position 0 begins a document."""
    if positions.ndim != 1:
        raise ValueError(
            f"plan_documents needs positions of one stream [tokens], got {list(positions.shape)}; "
            f"join the rows of the batch"
        )
    starts = (positions == 0).nonzero().flatten().tolist()
    mask = magi.masks.from_cu_seqlens([*starts, len(positions)])
    return magi.plan(mask, cp_mesh, heads)


def heads_of(attention: GQAttention.Config, num_tensor_ranks: int) -> magi.HeadShape:
    """The attention heads of one tensor-parallel rank."""
    num_kv = attention.n_kv_heads or attention.n_heads
    head_dim = attention.head_dim or attention.dim // attention.n_heads
    return magi.HeadShape(
        attention.n_heads // num_tensor_ranks, num_kv // num_tensor_ranks, head_dim
    )


class MagiTrainer(Trainer):
    """torchtitan's trainer with batches that are dispatched by our plan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This rank's tokens, labels, positions and plan."""
        if set(input_dict) != {"input", "positions"}:
            raise ValueError(
                f"MagiTrainer needs batches of input and positions, got {sorted(input_dict)}; "
                f"dispatch what else the model reads with magi.dispatch"
            )
        cp_mesh = self.parallel_dims.get_optional_mesh("cp")
        heads = heads_of(self.model_config.first_attention, self.parallel_dims.tp)
        plan = plan_documents(input_dict["positions"], heads, cp_mesh)
        tokens, positions, labels = (
            magi.dispatch(x, plan, cp_mesh, pad_value=pad)
            for x, pad in ((input_dict["input"], 0), (input_dict["positions"], 0),
                           (labels, IGNORE_INDEX))
        )  # fmt: skip
        self.ntokens_seen += labels.numel()
        others = {"positions": positions, "attention_masks": DispatchedDocuments(plan, cp_mesh)}
        if self.config.parallelism.spmd_backend != "spmd_types":
            return tokens, labels, others
        return annotate_input_spmd_types(self.parallel_dims, tokens, labels, others)


def with_magi(config: Trainer.Config) -> MagiTrainer.Config:
    """A configuration whose model was made with ``attn_backend="varlen"``, on our attention."""
    found = list(config.model_spec.model.traverse(VarlenAttention.Config))
    others = sorted({str(attention.window_size) for _, attention, _, _ in found} - {str(CAUSAL)})
    if not found or others:
        raise NotImplementedError(
            f"with_magi needs layers of varlen attention with the window {CAUSAL}, got "
            f"{f'windows {others}' if found else 'none'}; make the model with attn_backend='varlen'"
        )
    for _, _, parent, name in found:
        setattr(parent, name, MagiAttention.Config())
    config.parallelism.spmd_backend = "spmd_types"  # what torchtitan's context parallelism needs
    config.training.disable_cuda_graphs = True  # every batch has a plan of its own
    return MagiTrainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)})
