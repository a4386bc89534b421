"""Flags that Megatron had, or that its forks have, and what Megatron 0.18 to 0.20 has instead."""

from __future__ import annotations

_FLAGS_BY_HINT = {
    "gone: it is the default": (
        "--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce "
        "--use-contiguous-buffers-in-local-ddp --no-query-key-layer-scaling "
        "--add-position-embedding --overlap-p2p-communication"
    ),
    "gone: leave it out": (
        "--mmap-warmup --use-legacy-models --no-contiguous-buffers-in-local-ddp --DDP-impl "
        "--data-impl --no-scatter-gather-tensors-in-pipeline "
        "--pipeline-model-parallel-split-rank --delay-grad-reduce --no-delay-grad-reduce "
        "--legacy-tokenizer"
    ),
    "gone: --attention-backend chooses": "--use-flash-attn-v2",
    "now --pipeline-model-parallel-layout": "--standalone-embedding-stage",
    "now --decoder-first-pipeline-num-layers": "--num-layers-in-first-pipeline-stage",
    "now --recompute-method": "--activations-checkpoint-method",
    "now --recompute-num-layers": "--checkpoint-num-layers",
    "now --distribute-saved-activations": "--distribute-checkpointed-activations",
    "now --fp8-format hybrid": "--fp8-hybrid",
    "now --fp8-format e4m3": "--fp8-e4m3",
    "now --transformer-impl transformer_engine": "--transformer-engine",
    "now --norm-epsilon": "--layernorm-epsilon",
    "now --normalization RMSNorm": "--use-rmsnorm --RMSNorm",
    "now --position-embedding-type": "--no-add-position-embedding",
    "now --override-opt_param-scheduler": "--override-lr-scheduler",
    "now --use-checkpoint-opt_param-scheduler": "--use-checkpoint-lr-scheduler",
    "now --use-megatron-fsdp": "--use-custom-fsdp",
    "now --expert-tensor-parallel-size": "--enable-expert-tensor-parallelism --moe-extended-tp",
    "now --moe-expert-capacity-factor": "--moe-train-capacity-factor",
    "now --moe-grouped-gemm": "--moe-use-legacy-grouped-gemm",
    "now --hybrid-layer-pattern": "--hybrid-attention-ratio --hybrid-mlp-ratio",
    "now --seq-length": "--seq-len",
    "now --num-query-groups": "--num-attention-heads-kv",
    "of a fork: leave it out": (
        "--log-optimizer-states-to-tensorboard --embed-layernorm --kill-switch-path "
        "--pp-partition-method --use-fused-rmsnorm --use-fused-swiglu "
        "--use-fused-rotary-pos-emb --use-cp-send-recv-overlap --reuse-fp32-param --shape-order"
    ),
    "now --tokenizer-model": "--tokenizer-name-or-path",
    "now --cp-comm-type": "--context-parallel-algo",
    "now --optimizer-cpu-offload": "--cpu-optimizer",
    "of DeepSpeed: leave it out": (
        "--deepspeed --deepspeed_config --zero-stage --deepspeed-activation-checkpointing "
        "--no-pipeline-parallel"
    ),
    "now --context-parallel-size": "--ds-sequence-parallel-size",
}

FORMER_FLAGS = {flag: hint for hint, flags in _FLAGS_BY_HINT.items() for flag in flags.split()}
"""Hints that follow an unknown flag, in brackets."""
