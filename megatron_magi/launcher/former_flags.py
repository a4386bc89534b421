"""Flags that Megatron had, or that its forks have, and what Megatron 0.18 to 0.20 has instead."""

from __future__ import annotations

_GONE = "gone: it is the default"
_GONE_APART = "gone: leave it out"
_DEEPSPEED = "of DeepSpeed: leave it out"
_FORK = "of a fork: leave it out"


def _now(flag: str) -> str:
    return f"now {flag}"


FORMER_FLAGS: dict[str, str] = {
    "--no-async-tensor-model-parallel-allreduce": _GONE,
    "--async-tensor-model-parallel-allreduce": _GONE,
    "--use-contiguous-buffers-in-local-ddp": _GONE,
    "--no-query-key-layer-scaling": _GONE,
    "--mmap-warmup": _GONE_APART,
    "--use-legacy-models": _GONE_APART,
    "--use-flash-attn-v2": "gone: --attention-backend chooses",
    "--no-contiguous-buffers-in-local-ddp": _GONE_APART,
    "--DDP-impl": _GONE_APART,
    "--data-impl": _GONE_APART,
    "--no-scatter-gather-tensors-in-pipeline": _GONE_APART,
    "--standalone-embedding-stage": _now("--pipeline-model-parallel-layout"),
    "--pipeline-model-parallel-split-rank": _GONE_APART,
    "--num-layers-in-first-pipeline-stage": _now("--decoder-first-pipeline-num-layers"),
    "--activations-checkpoint-method": _now("--recompute-method"),
    "--checkpoint-num-layers": _now("--recompute-num-layers"),
    "--distribute-checkpointed-activations": _now("--distribute-saved-activations"),
    "--fp8-hybrid": _now("--fp8-format hybrid"),
    "--fp8-e4m3": _now("--fp8-format e4m3"),
    "--transformer-engine": _now("--transformer-impl transformer_engine"),
    "--layernorm-epsilon": _now("--norm-epsilon"),
    "--use-rmsnorm": _now("--normalization RMSNorm"),
    "--RMSNorm": _now("--normalization RMSNorm"),
    "--no-add-position-embedding": _now("--position-embedding-type"),
    "--add-position-embedding": _GONE,
    "--override-lr-scheduler": _now("--override-opt_param-scheduler"),
    "--use-checkpoint-lr-scheduler": _now("--use-checkpoint-opt_param-scheduler"),
    "--overlap-p2p-communication": _GONE,
    "--delay-grad-reduce": _GONE_APART,
    "--no-delay-grad-reduce": _GONE_APART,
    "--use-custom-fsdp": _now("--use-megatron-fsdp"),
    "--enable-expert-tensor-parallelism": _now("--expert-tensor-parallel-size"),
    "--moe-extended-tp": _now("--expert-tensor-parallel-size"),
    "--moe-train-capacity-factor": _now("--moe-expert-capacity-factor"),
    "--moe-use-legacy-grouped-gemm": _now("--moe-grouped-gemm"),
    "--hybrid-attention-ratio": _now("--hybrid-layer-pattern"),
    "--hybrid-mlp-ratio": _now("--hybrid-layer-pattern"),
    "--legacy-tokenizer": _GONE_APART,
    "--seq-len": _now("--seq-length"),
    "--num-attention-heads-kv": _now("--num-query-groups"),
    "--log-optimizer-states-to-tensorboard": _FORK,
    "--embed-layernorm": _FORK,
    "--kill-switch-path": _FORK,
    "--pp-partition-method": _FORK,
    "--tokenizer-name-or-path": _now("--tokenizer-model"),
    "--use-fused-rmsnorm": _FORK,
    "--use-fused-swiglu": _FORK,
    "--use-fused-rotary-pos-emb": _FORK,
    "--use-cp-send-recv-overlap": _FORK,
    "--context-parallel-algo": _now("--cp-comm-type"),
    "--reuse-fp32-param": _FORK,
    "--shape-order": _FORK,
    "--cpu-optimizer": _now("--optimizer-cpu-offload"),
    "--deepspeed": _DEEPSPEED,
    "--deepspeed_config": _DEEPSPEED,
    "--zero-stage": _DEEPSPEED,
    "--deepspeed-activation-checkpointing": _DEEPSPEED,
    "--ds-sequence-parallel-size": _now("--context-parallel-size"),
    "--no-pipeline-parallel": _DEEPSPEED,
}
"""Hints that follow an unknown flag, in brackets."""
