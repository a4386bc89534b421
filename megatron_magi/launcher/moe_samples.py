"""The sequence-wise auxiliary loss of MoE routers where a microbatch has several samples.

Megatron balances the experts of every sample by itself, and finds a sample's rows by their place:
row r of sample b is logits[r, b]. Under the flag the samples are one stream, whose rows lie where
the plan put them. So every row's sample comes with its plan, and a router's scores and choices are
spread over one column of experts for each sample, as Megatron has them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.core.cuda.tables import upload
from megatron_magi.launcher.constraints import balances_samples
from megatron_magi.launcher.session import LauncherState, hook


def give_samples(launch: LauncherState, model: Any) -> None:
    """Let every MoE layer of a model hand its router the samples of its rows, also when the layer
    is computed again."""
    if not launch.joins_samples() or not balances_samples(launch.args):
        return
    for layer in model.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if router is not None:
            give = functools.partial(_give, launch, router)
            layer.register_forward_pre_hook(give, with_kwargs=True)


def _give(
    launch: LauncherState, router: Any, layer: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    packed = next(
        (a for a in (*args, *kwargs.values()) if isinstance(a, MagiPackedSeqParams)), None
    )
    router.magi_samples = None if packed is None else samples_of_rows(launch, packed)


def samples_of_rows(launch: LauncherState, packed: MagiPackedSeqParams) -> tuple[int, Tensor]:
    """(samples in the microbatch, int64 [rows of this rank]: the sample of every row).

    Under sequence parallelism a rank has its share of the context-parallel rank's rows.
    """
    total = packed.token_plan.layout.total_seqlen
    assert launch.sequences is not None, "layers run inside a schedule"
    count, _ = launch.sequences
    known = getattr(packed, "_magi_samples", None)
    if known is None or known[0] != count:
        rank = parallel_state.get_context_parallel_rank()
        rows = packed.token_plan.layout.position_ids(rank) // (total // count)
        assert packed.rope_positions is not None, "an assembled object has positions"
        known = count, upload(torch.from_numpy(rows), packed.rope_positions.device)
        packed._magi_samples = known
    if not launch.args.sequence_parallel:
        return known
    shares = known[1].chunk(parallel_state.get_tensor_model_parallel_world_size())
    return count, shares[parallel_state.get_tensor_model_parallel_rank()]


@hook
def wrap_seq_aux_loss(
    launch: LauncherState,
    original: Any,
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """For `TopKRouter._apply_seq_aux_loss`: samples that are joined are balanced one by one.

    The loss is the mean over the samples of what Megatron computes for one. Megatron's own function
    is not called, because its number of tokens is one of a sample and depends on the version.

    Args:
        scores_for_aux_loss: [rows, experts]; routing_map likewise.

    Raises:
        RuntimeError: a router that was not told the samples of its rows.

    Cost: one all-reduce of samples times experts numbers.
    """
    if not launch.joins_samples() or not self.get_aux_loss_coeff("seq_aux_loss"):
        return original(self, probs, scores_for_aux_loss, routing_map, *args, **kwargs)
    count, samples = _take_samples(self)
    scores, chosen = (
        _one_column_a_sample(x, samples, count)
        for x in (scores_for_aux_loss, routing_map.to(scores_for_aux_loss.dtype))
    )
    tokens_per_expert = chosen.sum(dim=0).detach()
    dist.all_reduce(tokens_per_expert, group=self.tp_cp_group)
    coefficient = self.get_aux_loss_coeff("seq_aux_loss")
    loss = switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=tokens_per_expert,
        total_num_tokens=len(samples) * self.tp_cp_group.size() // count,
        topk=self.topk,
        num_experts=self.config.num_moe_experts,
        moe_aux_loss_coeff=coefficient,
        fused=self.config.moe_router_fusion,
    )
    name, group = "seq_load_balancing_loss", self.tp_cp_group
    return self.attach_and_log_load_balancing_loss(
        probs, coefficient, loss / count, name, group, valid_token_count=len(samples)
    )


def _take_samples(router: Any) -> tuple[int, Tensor]:
    given = getattr(router, "magi_samples", None)
    if given is None:
        raise RuntimeError(
            f"seq_aux_loss over several samples requires a router inside a layer that gets "
            f"packed_seq_params, got a call of {type(router).__name__} without; take moe out of "
            f"--recompute-modules, leave --overlap-moe-expert-parallel-comm out, or set "
            f"--micro-batch-size 1"
        )
    router.magi_samples = None  # the next call gets its own
    return given


def _one_column_a_sample(x: Tensor, samples: Tensor, count: int) -> Tensor:
    """[rows, experts] as [rows, count * experts]: a row stands in its sample's columns alone."""
    columns = torch.nn.functional.one_hot(samples, count).to(x.dtype)
    return (x[:, None, :] * columns[:, :, None]).flatten(1)
