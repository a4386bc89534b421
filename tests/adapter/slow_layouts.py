"""Layouts that scripts/test.sh trains with --all only.

Another layout of the same file covers what each of them combines.
"""

SLOW_LAYOUTS = {
    "test_layouts.py": {
        *("tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "cp4", "dp2", "dp2-cp2", "cp2-pp2"),
        *("tp2-sp-cp2", "dp2-distributed-optimizer", "dp2-cp2-overlap", "cp2-recompute-core-attn"),
        *("cp2-stages2", "cp2-stream-positions", "moe-cp2", "moe-ep2-cp2", "window-cp2"),
        *("cp3-odd-length", "cp4-padded", "cp2-one-row-chunks", "bf16-cp2", "tp2-sp-pp2-cp2"),
        *("cp2-pp4", "moe-ep2-cp2-dp2"),
    },
    "test_mla.py": {
        *("mla-rope-cp2", "mla-rope-cp3-odd-length", "mla-yarn-cp2", "mla-pp2", "mla-tp2-sp"),
        *("mla-cp2-stream-positions", "mla-cp2-recompute-core-attn", "mla-cp2-stages2"),
        *("mla-rope-one-process", "mla-yarn-one-process"),
    },
    "test_mtp.py": {
        *("packed-one-process", "one-one-process", "cp3-odd-length", "cp4-padded"),
        *("cp2-one-row-chunks", "one-cp2-pp2", "dp2-cp2-distributed-optimizer"),
    },
    "test_attention_options.py": {
        *("learnable-tp2-sp", "learnable-cp2", "learnable-cp3-odd-length", "learnable-cp2-pp2"),
        *("learnable-cp2-recompute-core-attn", "learnable-windows-cp2", "off-by-one-cp2"),
        *("clip-cp3-odd-length", "clip-cp2-recompute-core-attn", "log-cp2"),
        *("learnable-cp4-padded", "clip-cp2-pp2", "clip-cp2-recompute-full"),
    },
}
