"""Every place that we replace under Bridge: those of megatron.core, and Bridge's own."""

from __future__ import annotations

from megatron_magi.adapter.compat import MegatronVersion
from megatron_magi.bridge import batch, schedule, vision
from megatron_magi.launcher.hook_points import HookPoint, points_of
from megatron_magi.launcher.schedule import wrap_train_step

QWEN_TEXT = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model"

OF_BRIDGE = (
    HookPoint(
        "batch", "megatron.core.utils", "get_batch_on_this_cp_rank", ("batch", "cp_group"),
        batch.replace_rows, everywhere=True,
    ),
    HookPoint(
        "packed-batch", "megatron.bridge.training.gpt_step", "_partition_packed_batch_for_cp",
        ("batch", "cp_group"), batch.replace_rows,
    ),
    HookPoint(
        "vision-rows", "megatron.bridge.training.utils.packed_seq_utils",
        "get_packed_seq_cp_partition_indices", ("packed_seq_params", "total_tokens", "device"),
        vision.replace_partition, everywhere=True,
    ),
    HookPoint(
        "vision-model", QWEN_TEXT, "Qwen3VLGPTModel.__init__",
        ("config", "transformer_layer_spec"), vision.wrap_model_init,
    ),
    HookPoint(
        "vision-positions", QWEN_TEXT, "Qwen3VLMultimodalRotaryEmbedding", ("cp_group",),
        vision.wrap_rotary,
    ),
    HookPoint(
        "setup", "megatron.bridge.training.pretrain", "setup", ("state",), schedule.wrap_setup,
    ),
    HookPoint(
        "tp-buffers", "megatron.bridge.training.initialize", "_initialize_tp_communicators",
        ("model_config", "micro_batch_size"), schedule.wrap_tp_communicators,
    ),
    HookPoint(
        "schedule", "megatron.bridge.training.train", "get_forward_backward_func", (),
        schedule.wrap_get_schedule,
    ),
    HookPoint(
        "validation", "megatron.bridge.training.eval", "get_forward_backward_func", (),
        schedule.wrap_get_schedule,
    ),
    HookPoint(
        "step", "megatron.bridge.training.train", "train_step",
        ("forward_step_func", "forward_backward_func"), wrap_train_step,
    ),
)  # fmt: skip


def bridge_points(version: MegatronVersion) -> list[HookPoint]:
    """The rows for this megatron-core.

    Raises:
        HookError: a version that the launcher's table does not know.
    """
    core = [point for point in points_of(version) if point.module.startswith("megatron.core.")]
    return [point for point in core if point.name != "batch"] + [*OF_BRIDGE]
