"""Every place of Megatron that we replace, with what we rely on there.

One table for all versions. `check` compares it with the installed Megatron, so that a new version
is checked in seconds: `python scripts/check_hooks.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_magi.adapter.compat import MegatronVersion
from megatron_magi.launcher import (
    balanced_loader,
    batch,
    captured_attention,
    checkpoints,
    data_files,
    fsdp2,
    model_hooks,
    moe,
    moe_samples,
    norms,
    preallocated_buffers,
    restart,
    samples,
    schedule,
    settings,
)

Minor = tuple[int, int]
FIRST: Minor = (0, 18)
LAST: Minor = (0, 20)
SUPPORTED = "0.18 to 0.20"
"""Versions of Megatron whose pretrain scripts the launcher runs."""


class HookError(ImportError):
    """This Megatron is not what the table expects."""


@dataclass(frozen=True)
class HookPoint:
    """One attribute that is replaced."""

    name: str
    """Short, for the start-up line."""
    module: str
    attribute: str
    """In the module; a method as Class.method."""
    parameters: tuple[str, ...]
    """Parameters that its signature must have, because the wrapper passes or reads them."""
    wrap: Callable[[Any, Any], Any]
    """(the original, the LauncherState) -> what takes its place."""
    first: Minor = FIRST
    last: Minor = LAST
    everywhere: bool = False
    """Rebind it also in every module that imported it by name."""

    def owner(self) -> tuple[Any, str]:
        """The module or class that has the attribute, and its name there.

        Raises:
            HookError: there is none.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            *path, name = self.attribute.split(".")
            for part in path:
                owner = getattr(owner, part)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise HookError(f"{self.name}: {self.module}.{self.attribute} ({error})") from error
        return owner, name


HOOK_POINTS = (
    HookPoint(
        "settings", "megatron.training.arguments", "validate_args", ("args",),
        settings.wrap_validate_args, everywhere=True,
    ),
    HookPoint(
        "yaml", "megatron.training.yaml_arguments", "load_yaml", ("yaml_path",),
        settings.wrap_load_yaml,
    ),
    HookPoint(
        "batch", "megatron.core.utils", "get_batch_on_this_cp_rank", ("batch", "cp_group"),
        batch.replace_cp_batch, everywhere=True,
    ),
    HookPoint(
        "scheduled-batch", "megatron.core.datasets.data_schedule",
        "get_batch_on_this_rank_for_sequence_packing", ("data_iterator", "pg_collection"),
        batch.replace_scheduled_batch, first=(0, 20), everywhere=True,
    ),
    HookPoint(
        "sft-data", "megatron.training.datasets.sft_dataset", "SFTDataset.__init__",
        ("config",), batch.wrap_sft_dataset,
    ),
    HookPoint(
        "datasets", "megatron.core.datasets.blended_megatron_dataset_builder",
        "BlendedMegatronDatasetBuilder.__init__", ("is_built_on_rank",),
        samples.wrap_dataset_builder,
    ),
    HookPoint(
        "data-file", "megatron.core.datasets.indexed_dataset", "IndexedDataset.__init__",
        ("path_prefix",), data_files.wrap_open_data_file,
    ),
    HookPoint(
        "epochs", "megatron.core.datasets.gpt_dataset", "GPTDataset._get_num_epochs",
        ("num_tokens_per_epoch",), data_files.wrap_count_epochs,
    ),
    HookPoint(
        "loader", "megatron.training.datasets.data_samplers", "build_pretraining_data_loader",
        ("dataset", "consumed_samples"), balanced_loader.wrap_data_loader, everywhere=True,
    ),
    HookPoint(
        "samples", "megatron.core.rerun_state_machine", "RerunDataIterator.__next__", (),
        samples.wrap_next_sample,
    ),
    HookPoint(
        "gpt", "megatron.core.models.gpt.gpt_model", "GPTModel.__init__",
        ("config", "transformer_layer_spec", "mtp_block_spec"), model_hooks.wrap_model_init,
    ),
    HookPoint(
        "gpt-forward", "megatron.core.models.gpt.gpt_model", "GPTModel.forward",
        ("input_ids", "attention_mask", "labels", "packed_seq_params"), model_hooks.keep,
    ),
    HookPoint(
        "schedule-plan", "megatron.core.models.gpt.gpt_model", "GPTModel.build_schedule_plan",
        ("input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params"),
        model_hooks.wrap_schedule_plan,
    ),
    HookPoint(
        "hybrid", "megatron.core.models.hybrid.hybrid_model", "HybridModel.__init__",
        ("config", "hybrid_stack_spec"), model_hooks.wrap_model_init,
    ),
    HookPoint(
        "state-to-stream", "megatron.core.ssm.mamba_context_parallel",
        "_undo_attention_load_balancing", ("input_", "packed_seq_params"),
        model_hooks.keep,
    ),
    HookPoint(
        "state-to-ranks", "megatron.core.ssm.mamba_context_parallel",
        "_redo_attention_load_balancing", ("input_", "packed_seq_params"),
        model_hooks.keep,
    ),
    HookPoint(
        "mamba", "megatron.core.ssm.mamba_mixer", "MambaMixer.forward",
        ("hidden_states", "packed_seq_params"), model_hooks.keep,
    ),
    HookPoint(
        "delta-net", "megatron.core.ssm.gated_delta_net", "GatedDeltaNet.forward",
        ("hidden_states", "packed_seq_params"), model_hooks.keep, first=(0, 19),
    ),
    HookPoint(
        "delta-net-order", "megatron.core.ssm.gated_delta_net.common", "_build_thd_cp_a2a_perm",
        ("cu_seqlens",), model_hooks.keep, first=(0, 19),
    ),
    HookPoint(
        "delta-net-documents", "megatron.core.ssm.gated_delta_net.common",
        "_GDNBase._resolve_cu_seqlens", ("cu_seqlens_actual",), model_hooks.keep,
        first=(0, 19),
    ),
    HookPoint(
        "delta-product", "megatron.core.ssm.gated_delta_product", "GatedDeltaProductMixer.forward",
        ("hidden_states", "packed_seq_params"), model_hooks.keep, first=(0, 20),
    ),
    HookPoint(
        "final-norm", "megatron.core.transformer.transformer_block", "LayerNormImpl",
        ("config",), norms.own_final_norm,
    ),
    HookPoint(
        "aux-loss", "megatron.core.transformer.moe.router",
        "TopKRouter.attach_and_log_load_balancing_loss", ("activation", "valid_token_count"),
        moe.wrap_attach_aux_loss, last=(0, 18),
    ),
    HookPoint(
        "z-loss", "megatron.core.transformer.moe.router", "TopKRouter.apply_z_loss", ("logits",),
        moe.wrap_z_loss, last=(0, 18),
    ),
    HookPoint(
        "seq-aux-loss", "megatron.core.transformer.moe.router", "TopKRouter._apply_seq_aux_loss",
        ("probs", "routing_map", "seq_length", "bsz", "with_padding_mask"),
        moe_samples.wrap_seq_aux_loss,
    ),
    HookPoint(
        "tp-buffers", "megatron.training.initialize", "_initialize_tp_communicators", (),
        preallocated_buffers.wrap_tp_communicators,
    ),
    HookPoint(
        "yarn-tables", "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
        "YarnRotaryEmbedding._set_cos_sin_cache", ("packed_seq",),
        preallocated_buffers.wrap_yarn_tables,
    ),
    HookPoint(
        "graph-shapes", "megatron.core.transformer.cuda_graphs", "TECudaGraphHelper.__init__",
        ("config", "seq_length", "micro_batch_size"), preallocated_buffers.wrap_graph_helper,
    ),
    HookPoint(
        "graph-inputs", "megatron.core.transformer.transformer_layer",
        "TransformerLayer.get_layer_static_inputs", (), captured_attention.wrap_static_inputs,
    ),
    HookPoint(
        "graph-replays", "megatron.core.transformer.transformer_layer",
        "TransformerLayer._get_te_cuda_graph_replay_args", (),
        captured_attention.wrap_replay_arguments,
    ),
    HookPoint(
        "fsdp2-gradients", "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "TorchFullyShardedDataParallel.scale_gradients", ("scaling_factor",),
        fsdp2.replace_scale_gradients,
    ),
    HookPoint(
        "schedule", "megatron.training.training", "get_forward_backward_func", (),
        schedule.wrap_get_schedule,
    ),
    HookPoint(
        "step", "megatron.training.training", "train_step",
        ("forward_step_func", "forward_backward_func"), schedule.wrap_train_step,
    ),
    HookPoint(
        "load", "megatron.training.checkpointing", "load_checkpoint", ("ddp_model", "optimizer"),
        checkpoints.wrap_load_checkpoint, everywhere=True,
    ),
    HookPoint(
        "save", "megatron.training.checkpointing", "save_checkpoint", ("iteration", "model"),
        checkpoints.wrap_save_checkpoint, everywhere=True,
    ),
    HookPoint(
        "restart", "megatron.training.inprocess_restart", "inprocess_restart", ("train", "args"),
        restart.wrap_inprocess_restart,
    ),
    HookPoint(
        "forget", "megatron.training.training", "destroy_global_state", (),
        restart.wrap_destroy_global_state,
    ),
)  # fmt: skip


def points_of(version: MegatronVersion) -> list[HookPoint]:
    """The table's rows for this version.

    Raises:
        HookError: a version that the table does not know.
    """
    if not FIRST <= version[:2] <= LAST:
        raise HookError(
            f"the launcher requires Megatron-LM {SUPPORTED}, got {version}; use one of these"
        )
    return [point for point in HOOK_POINTS if point.first <= version[:2] <= point.last]


def check(version: MegatronVersion) -> None:
    """Compare the table with this Megatron.

    Raises:
        HookError: one line with every hook that does not fit.
    """
    check_points(points_of(version), version)


def check_points(points: Iterable[HookPoint], version: MegatronVersion) -> None:
    """Compare rows of a table with this Megatron.

    Raises:
        HookError: one line with every hook that does not fit.
    """
    found = [text for point in points for text in problems(point)]
    if found:
        raise HookError(
            f"the launcher requires the hooks of Megatron-LM {SUPPORTED}, got {version} with other "
            f"code at {'; '.join(found)}; use a released version, or see scripts/check_hooks.py"
        )


def problems(point: HookPoint) -> Iterator[str]:
    """Returns the mismatches at one hook point, in words that begin with its name."""
    try:
        owner, name = point.owner()
    except HookError as error:
        yield str(error)
        return
    if not point.parameters:
        return
    parameters = inspect.signature(getattr(owner, name)).parameters
    missing = [p for p in point.parameters if p not in parameters]
    if missing:
        yield f"{point.name}: {point.module}.{point.attribute} has no {', '.join(missing)}"
