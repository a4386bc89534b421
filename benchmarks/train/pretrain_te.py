"""Small cases of pretrain.py with TransformerEngine's layers: one model for each Megatron flag.

Stock Megatron runs next to the flag wherever it can.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.train.pretrain_cases import (
    COMMON,
    DOCUMENTS,
    MAGI,
    SMALL,
    WORK,
    Case,
    Flags,
    layout,
)

NOT_WITH_TE = ("no-rope-fusion", "no-persist-layer-norm")
TE: Flags = {
    **{name: value for name, value in COMMON.items() if name not in NOT_WITH_TE},
    "transformer-impl": "transformer_engine",
}
"""TransformerEngine's layers; apex, which fuses gradient accumulation, is not there."""

CUDNN: Flags = {"attention-backend": "fused"}
FA3: Flags = {"attention-backend": "flash", "flash-attention-version": 3}

CP2 = layout(cp=2)
PER_TOKEN: Flags = {"calculate-per-token-loss": True}
"""What our flag sets; with it, delayed fp8 scales begin with gradients of the same size."""
FP8: Flags = {"fp8-format": "hybrid"}
TENSORWISE: Flags = {**FP8, "fp8-recipe": "tensorwise"}
SHARDED: Flags = {"use-distributed-optimizer": True}
TP2_OVERLAP: Flags = {**layout(tp=2), "tp-comm-overlap": True}
MOE: Flags = {
    "num-experts": 4,
    "expert-model-parallel-size": 2,
    "moe-router-topk": 2,
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.01,
    "moe-token-dispatcher-type": "alltoall",
    "moe-grouped-gemm": True,
    **PER_TOKEN,
    **SHARDED,
}
MOE_OVERLAP: Flags = {**MOE, "overlap-moe-expert-parallel-comm": True}
SEQ_AUX: Flags = {**MOE, "moe-router-load-balancing-type": "seq_aux_loss", "micro-batch-size": 2}
MLP_GRAPHS: Flags = {
    "cuda-graph-impl": "transformer_engine",
    "cuda-graph-scope": "mlp",
    "te-rng-tracker": True,
}
TE_GRAPHS: Flags = {"cuda-graph-impl": "transformer_engine", "te-rng-tracker": True}
ATTENTION_GRAPHS: dict[str, Flags] = {
    "attention graphs": {**TE_GRAPHS, "cuda-graph-scope": "attn"},
    "layer graphs": TE_GRAPHS,
    "local graphs": {"cuda-graph-impl": "local", "te-rng-tracker": True},
    "step graphs": {
        "cuda-graph-impl": "full_iteration",
        "te-rng-tracker": True,
        "no-check-for-nan-in-loss-and-grad": True,
    },
}
"""Megatron's graphs that hold attention."""
EXCHANGING = ("attention graphs", "layer graphs", "local graphs")
"""Those that may hold an exchange between context-parallel ranks."""
GRAPHS: Flags = {**MOE, **MLP_GRAPHS, "cuda-graph-scope": ["moe_router", "moe_preprocess"]}
MLA: Flags = {
    "multi-latent-attention": True,
    "group-query-attention": None,
    "num-query-groups": None,
    "q-lora-rank": 256,
    "kv-lora-rank": 128,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
}
UNFUSED: Flags = {"no-rope-fusion": True}
GPT_OSS: Flags = {
    "position-embedding-type": "yarn",
    "rotary-scaling-factor": 32.0,
    "yarn-original-max-position-embeddings": 512,
    "softmax-type": "learnable",
    "window-size": "127,0",
    "window-attn-skip-freq": 2,
    "kv-channels": 64,
    "no-rope-fusion": True,
}
MEGATRON_FSDP: Flags = {
    "use-megatron-fsdp": True,
    "data-parallel-sharding-strategy": "optim_grads_params",
    "ckpt-format": "fsdp_dtensor",
    **PER_TOKEN,
    **SHARDED,
}
FSDP2: Flags = {"use-torch-fsdp2": True, "ckpt-format": "torch_dist"}
OFFLOAD: Flags = {"cpu-offloading-num-layers": 2}
FINE_OFFLOAD: Flags = {
    "fine-grained-activation-offloading": True,
    "offload-modules": ["core_attn", "attn_proj"],
}
RECOMPUTE: Flags = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
}
DELTA_NET: Flags = {
    "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    "hybrid-layer-pattern": "G-*-G-*-",
    "num-layers": None,
    "linear-num-key-heads": 4,
    "linear-num-value-heads": 8,
    "linear-key-head-dim": 64,
    "linear-value-head-dim": 64,
}
"""Gated delta net, attention and MLPs by turns; the delta net runs on kernels of fla."""
SAVED_AT = 12
"""Where a run ends that another one goes on from."""
STOCK_SAVES: Flags = {"save": f"{WORK}/stock", "save-interval": 6, "exit-interval": SAVED_AT}
MAGI_SAVES: Flags = {**STOCK_SAVES, "save": f"{WORK}/magi"}
ASYNC: Flags = {"async-save": True, "async-strategy": "mcore"}
DETERMINISTIC: Flags = {"deterministic-mode": True}
REPEATABLE = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
OFFLOAD_V1 = {"NVTE_CPU_OFFLOAD_V1": "1"}
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
NO_MULTICAST = {"UB_SKIPMC": "1"}
PP2 = layout(pp=2)
TIED_VIRTUAL: Flags = {
    "num-virtual-stages-per-pipeline-rank": 2,
    "untie-embeddings-and-output-weights": None,
}
DEALT: Flags = {"magi-balance-step": True}


def case(
    name: str,
    gpus: int,
    *parts: Flags,
    environment: dict[str, str] | None = None,
    after: str | None = None,
) -> Case:
    """A case of TransformerEngine's layers; later parts win."""
    flags: Flags = {}
    for part in parts:
        flags |= part
    return Case(name, gpus, flags, dict(environment or {}), TE, after)


def both(
    name: str, gpus: int, *parts: Flags, environment: dict[str, str] | None = None
) -> list[Case]:
    """The same flags without and with ours."""
    return [
        case(f"stock {name}", gpus, SMALL, *parts, environment=environment),
        case(f"magi {name}", gpus, SMALL, *parts, MAGI, environment=environment),
    ]


def flag_cases() -> list[Case]:
    """Small models, one for each flag; the first letters say on which layout."""
    return [
        case("stock cp1", 1, SMALL),
        *both("cp2", 2, CP2),
        *both("cp2 fp8 tensorwise", 2, CP2, TENSORWISE),
        *both("cp2 fp8 delayed", 2, CP2, PER_TOKEN, FP8, {"fp8-recipe": "delayed"}),
        *both("cp2 fp8 blockwise", 2, CP2, FP8, {"fp8-recipe": "blockwise"}),
        *both("cp2 fp8 params", 2, CP2, TENSORWISE, SHARDED, {"fp8-param-gather": True}),
        case("magi cp2 fp8 odd", 2, SMALL, MAGI, CP2, TENSORWISE, {"seq-length": 2043}),
        case("magi cp2 fp8 blockwise odd", 2, SMALL, MAGI, CP2, FP8,
             {"fp8-recipe": "blockwise", "seq-length": 2043}),
        case("magi cp2 fp8 documents", 2, SMALL, MAGI, CP2, TENSORWISE, DOCUMENTS),
        *both("tp2 sp overlap", 2, TP2_OVERLAP, environment=NO_MULTICAST),
        case("magi tp2 sp overlap odd", 2, SMALL, MAGI, TP2_OVERLAP, {"seq-length": 2043},
             environment=NO_MULTICAST),
        *both("cp2 moe", 2, CP2, MOE),
        *both("cp2 moe overlap", 2, CP2, MOE_OVERLAP, environment=CONNECTIONS),
        *both("cp2 moe graphs", 2, CP2, GRAPHS),
        *both("ep2 seq aux mb2", 2, SEQ_AUX),
        *both("cp2 mla fused", 2, CP2, MLA),
        case("magi cp2 mla", 2, SMALL, MAGI, CP2, MLA, UNFUSED),
        *both("cp1 gpt-oss", 1, GPT_OSS),
        case("magi cp2 gpt-oss", 2, SMALL, MAGI, CP2, GPT_OSS),
        *both("dp2 megatron-fsdp", 2, MEGATRON_FSDP, environment=CONNECTIONS),
        *both("cp2 megatron-fsdp", 2, CP2, MEGATRON_FSDP, environment=CONNECTIONS),
        *both("dp2 fsdp2", 2, FSDP2, environment=CONNECTIONS),
        *both("cp2 fsdp2", 2, CP2, FSDP2, environment=CONNECTIONS),
        *both("cp2 offload", 2, CP2, OFFLOAD),
        *both("cp2 fine offload", 2, CP2, FINE_OFFLOAD, environment=OFFLOAD_V1),
        *both("cp2 mlp graphs", 2, CP2, MLP_GRAPHS),
        *both("cp2 recompute", 2, CP2, RECOMPUTE),
        case("stock cp2 saves", 2, SMALL, CP2, STOCK_SAVES),
        case("magi cp2 saves", 2, SMALL, MAGI, CP2, MAGI_SAVES, ASYNC),
        case("magi cp2 loads stock", 2, SMALL, MAGI, CP2, {"load": f"{WORK}/stock"},
             after="stock cp2 saves"),
        case("stock cp2 loads magi", 2, SMALL, CP2, {"load": f"{WORK}/magi"},
             after="magi cp2 saves"),
        case("magi cp2 loads magi", 2, SMALL, MAGI, CP2, {"load": f"{WORK}/magi"},
             after="magi cp2 saves"),
        case("magi cp2 deterministic a", 2, SMALL, MAGI, CP2, DETERMINISTIC,
             environment=REPEATABLE),
        case("magi cp2 deterministic b", 2, SMALL, MAGI, CP2, DETERMINISTIC,
             environment=REPEATABLE),
        *_captured(),
        *[x for kind in EXCHANGING for x in both(f"cp2 {kind}", 2, CP2, ATTENTION_GRAPHS[kind])],
        *both("tp2 layer graphs mb2", 2, layout(tp=2), TE_GRAPHS, {"micro-batch-size": 2}),
        *both("pp2 layer graphs", 2, PP2, TE_GRAPHS),
        *both("cp1 mla layer graphs", 1, MLA, TE_GRAPHS),
        *both("cp2 mla layer graphs", 2, CP2, MLA, TE_GRAPHS),
        *both("ep2 moe attention graphs", 2, MOE, TE_GRAPHS,
              {"cuda-graph-scope": ["attn", "moe_router", "moe_preprocess"]}),
        case("magi pp2 documents", 2, SMALL, MAGI, PP2, DOCUMENTS),
        case("magi cp1 documents", 1, SMALL, MAGI, DOCUMENTS),
        case("magi cp2 documents", 2, SMALL, MAGI, CP2, DOCUMENTS),
    ]  # fmt: skip


def _captured() -> list[Case]:
    kinds: dict[str, Flags] = {"eager": {}, **ATTENTION_GRAPHS}
    return [
        case(f"magi cp1 deterministic {kind}", 1, SMALL, MAGI, DETERMINISTIC, graphs,
             environment=REPEATABLE)
        for kind, graphs in kinds.items()
    ]  # fmt: skip


def delta_net_cases() -> list[Case]:
    """For an installed fla-core; its backward on Hopper needs tilelang too."""
    cases = [
        case("stock cp1 delta net", 1, SMALL, DELTA_NET),
        case("magi cp1 delta net", 1, SMALL, DELTA_NET, MAGI),
        case("magi cp2 delta net", 2, SMALL, DELTA_NET, MAGI, CP2),
        *both("cp1 delta net layer graphs", 1, DELTA_NET, TE_GRAPHS),
        case("magi cp2 delta net layer graphs", 2, SMALL, DELTA_NET, MAGI, CP2, TE_GRAPHS),
        case("magi cp1 delta net documents", 1, SMALL, DELTA_NET, MAGI, DOCUMENTS),
        case("magi cp2 delta net documents", 2, SMALL, DELTA_NET, MAGI, CP2, DOCUMENTS),
    ]
    return [replace(each, script="pretrain_hybrid.py") for each in cases]


def host_cases(gpus: int) -> list[Case]:
    """Small models on layouts of the four or eight GPUs of a host, which stands for two nodes in
    some. A checkpoint goes from one group to two and back."""
    half = gpus // 2
    one, tp, pp = f"cp{gpus}", f"tp2cp{half}", f"pp2cp{half}"
    all_ranks, with_tp, with_pp = layout(cp=gpus), layout(cp=half, tp=2), layout(cp=half, pp=2)
    nodes: Flags = {"magi-ranks-per-node": half}
    first, second = f"{WORK}/{one}", f"{WORK}/{tp}"
    return [
        case("stock cp1", 1, SMALL),
        *both(one, gpus, all_ranks),
        *both(tp, gpus, with_tp),
        *both(pp, gpus, with_pp),
        *both(f"cp{half} ep2", gpus, layout(cp=half), MOE),
        case(f"magi {one} nodes", gpus, SMALL, MAGI, all_ranks, nodes),
        case(f"stock dp{gpus} documents", gpus, SMALL, PER_TOKEN, DOCUMENTS),
        case(f"magi {one} documents", gpus, SMALL, MAGI, all_ranks, DOCUMENTS),
        case(f"magi {one} nodes documents", gpus, SMALL, MAGI, all_ranks, DOCUMENTS, nodes),
        case(f"magi {tp} documents", gpus, SMALL, MAGI, with_tp, DOCUMENTS),
        case(f"magi {pp} documents", gpus, SMALL, MAGI, with_pp, DOCUMENTS),
        case(f"magi dp{half}cp2 dealt documents", gpus, SMALL, MAGI, CP2, DOCUMENTS, DEALT),
        case("magi cp1 gpt-oss documents", 1, SMALL, MAGI, GPT_OSS, DOCUMENTS),
        case(f"magi {one} gpt-oss documents", gpus, SMALL, MAGI, all_ranks, GPT_OSS, DOCUMENTS),
        case("stock pp2 tied virtual", 2, SMALL, PP2, TIED_VIRTUAL),
        case(f"magi {pp} tied virtual", gpus, SMALL, MAGI, with_pp, TIED_VIRTUAL),
        case(f"magi {one} saves", gpus, SMALL, MAGI, all_ranks,
             {"save": first, "save-interval": 8, "exit-interval": 8}),
        case(f"magi {tp} loads {one}", gpus, SMALL, MAGI, with_tp,
             {"load": first, "save": second, "save-interval": 14, "exit-interval": 14},
             after=f"magi {one} saves"),
        case(f"magi {one} loads {tp}", gpus, SMALL, MAGI, all_ranks, {"load": second},
             after=f"magi {tp} loads {one}"),
    ]  # fmt: skip
