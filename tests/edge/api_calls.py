"""`megatron_magi.magi_attention`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_magi import magi_attention as api
from tests.edge import engine_arguments as engine
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.kinds import COUNT, FLAG, INT, POSITIVE, TENSOR, WINDOW, Kind

KEY = api.magi_attn_varlen_key([0, 6, 16], [0, 6, 16], 2, 1, 8, 0, None, causal=True)
X = torch.zeros(16, 4)
PAIRS = api.AttnRanges.from_ranges([[0, 6], [6, 16]])
ONE = api.AttnRange(2, 8)

SUMS: dict[str, Any] = {"cu_seqlens_q": [0, 6, 16], "cu_seqlens_k": [0, 6, 16]}
SUMS_KINDS = {"cu_seqlens_q": kind.SUMS, "cu_seqlens_k": kind.SUMS}
VARLEN = {"causal": True, "window_size": (-1, -1)}
VARLEN_KINDS = {"causal": FLAG, "window_size": WINDOW}
HEADS = {"num_heads_q": 2, "num_heads_kv": 1, "head_dim": 8}
HEADS_KINDS = dict.fromkeys(HEADS, POSITIVE)
RANGES: dict[str, Any] = {"q_ranges": PAIRS, "k_ranges": PAIRS, "attn_mask_type": "causal"}
RANGES_KINDS = {"q_ranges": kind.RANGES, "k_ranges": kind.RANGES, "attn_mask_type": kind.TYPE}
TOTALS = {"total_seqlen_q": 16, "total_seqlen_k": 16}
TOTALS_KINDS = dict.fromkeys(TOTALS, COUNT)
GROUP = {"pad_size": 0, "cp_group_or_mesh": None}
CONFIG = kind.config("DistAttnConfig")
GROUP_KINDS = {
    "pad_size": COUNT,
    "cp_group_or_mesh": kind.GROUP.also((2, "cp_group must be")),
    "dist_attn_config": CONFIG.also((None, "must be a DistAttnConfig")),
    "chunk_size": POSITIVE.without(None),
}
SOURCE_KINDS = dict.fromkeys(("is_same_source", "is_q_permutable", "is_k_permutable"), FLAG)
SIDE = {"side": kind.WORD}
UNUSED = ("mode", "dynamic_max_degree", "min_chunk_size", "max_num_chunks", "alg",
          "calc_cost_factor", "comm_cost_factor")  # fmt: skip
"""Settings of MagiAttention's algorithms, which have no effect."""
ALGORITHMS = [n for n in api.__all__ if n.endswith("Alg") or n == "GrpCollConfig"]
WORDS = {"cp_group_or_mesh": "cp_group", "attn_mask_type": "mask"}
SINK = kind.TENSOR.without(None).also(
    (torch.zeros(3), "[s, H]"), (torch.zeros(1, 2).int(), "float")
)

FUNCTIONS = [
    Call("magi_attn_varlen_key", api.magi_attn_varlen_key, SUMS | HEADS | GROUP | VARLEN,
         SUMS_KINDS | HEADS_KINDS | GROUP_KINDS | VARLEN_KINDS, words=WORDS),
    Call("magi_attn_varlen_dispatch", api.magi_attn_varlen_dispatch,
         {"x": X} | SUMS | HEADS | GROUP | VARLEN,
         {"x": TENSOR} | SUMS_KINDS | HEADS_KINDS | GROUP_KINDS | VARLEN_KINDS, words=WORDS),
    Call("magi_attn_flex_key", api.magi_attn_flex_key, RANGES | TOTALS | HEADS | GROUP,
         RANGES_KINDS | TOTALS_KINDS | HEADS_KINDS | GROUP_KINDS | SOURCE_KINDS, words=WORDS),
    Call("magi_attn_flex_dispatch", api.magi_attn_flex_dispatch,
         {"x": X} | RANGES | TOTALS | HEADS | GROUP,
         {"x": TENSOR} | RANGES_KINDS | TOTALS_KINDS | HEADS_KINDS | GROUP_KINDS | SOURCE_KINDS,
         words=WORDS),
    Call("make_varlen_key_for_new_mask_after_dispatch",
         api.make_varlen_key_for_new_mask_after_dispatch,
         SUMS | VARLEN | {"key_for_dispatch": KEY},
         SUMS_KINDS | VARLEN_KINDS | {"key_for_dispatch": kind.KEY, "dist_attn_config": CONFIG}),
    Call("make_flex_key_for_new_mask_after_dispatch",
         api.make_flex_key_for_new_mask_after_dispatch,
         RANGES | {"key_for_dispatch": KEY} | HEADS,
         RANGES_KINDS | {"key_for_dispatch": kind.KEY, "dist_attn_config": CONFIG}
         | dict.fromkeys(HEADS, POSITIVE.without(None)), words=WORDS),
    Call("dispatch", api.dispatch, {"x": X, "key": KEY},
         {"x": TENSOR, "key": kind.KEY, "pad_value": kind.NUMBER} | SIDE),
    Call("undispatch", api.undispatch, {"x": X, "key": KEY},
         {"x": TENSOR, "key": kind.KEY, "is_partial_grad": FLAG} | SIDE),
    Call("calc_attn", api.calc_attn, engine.QKV | {"key": KEY},
         engine.QKV_KINDS | {"key": kind.KEY, "sink": SINK, "softmax_scale": kind.SCALE,
                             "softcap": kind.SOFTCAP, "return_max_logits": FLAG}),
    *(
        Call(name, getattr(api, name), {"x": X, "shift": 1, "dim": 0, "key": KEY},
             {"x": TENSOR, "shift": INT, "dim": INT.also((2, "dimension 2")), "key": kind.KEY},
             words={"dim": "dim"})
        for name in ("roll", "roll_simple")
    ),
    Call("get_position_ids", api.get_position_ids, {"key": KEY}, {"key": kind.KEY} | SIDE),
    Call("get_most_recent_key", api.get_most_recent_key, {"cp_group": None},
         {"cp_group": kind.GROUP}),
    Call("clear_cache", api.clear_cache, {}, {"cp_group": kind.GROUP}),
    Call("flex_flash_attn_func", api.flex_flash_attn_func, engine.QKV | engine.RANGES,
         engine.FLEX_KINDS | {
             "q_block_size": INT.also((64, "block sizes")),
             "k_block_size": INT.also((64, "block sizes")),
             "sink": SINK, "sink_layout": kind.WORD.also(("shd", "sinks must be")),
             "softcap": kind.SOFTCAP, "index_attn": FLAG.also((True, "index_attn=True")),
             "return_max_logits": FLAG,
         }, free=("index_attn_indices", *api.TUNING_ARGUMENTS),
         words={"q_block_size": "", "k_block_size": "", "sink_layout": "sink"}),
    Call("compute_pad_size", api.compute_pad_size,
         {"total_seqlen_q": 10, "cp_size": 2, "chunk_size": 4},
         {"total_seqlen_q": COUNT, "cp_size": POSITIVE, "chunk_size": POSITIVE}),
    Call("squash_batch_dim", api.squash_batch_dim, {"x": X},
         {"x": TENSOR.also((torch.zeros(3), "batch"))}),
    Call("infer_varlen_mask_from_batch", api.infer_varlen_mask_from_batch,
         {"batch_size": 2, "seq_len": 4},
         {"batch_size": COUNT.also((2**31, "between")), "seq_len": COUNT.also((2**30, "between")),
          "device": kind.DEVICE}),
    Call("infer_attn_mask_from_sliding_window", api.infer_attn_mask_from_sliding_window,
         {"q_range": ONE, "k_range": ONE, "window_size": (2, 0)},
         {"q_range": kind.RANGE, "k_range": kind.RANGE, "window_size": WINDOW},
         words={"q_range": "range", "k_range": "range"}),
    Call("infer_attn_mask_from_cu_seqlens", api.infer_attn_mask_from_cu_seqlens,
         SUMS | {"window_size": (2, 0)},
         SUMS_KINDS | VARLEN_KINDS | {"global_window_size": COUNT}),
    Call("apply_padding", api.apply_padding, RANGES | {"total_seqlen": 16, "pad_size": 4},
         RANGES_KINDS | {"total_seqlen": COUNT, "pad_size": COUNT}, words=WORDS),
]  # fmt: skip

CONFIGS = [
    Call("DispatchConfig", api.DispatchConfig, {},
         {"chunk_size": POSITIVE.without(None), "uneven_shard": FLAG.also((True, "equally many"))},
         free=("alg",)),
    Call("OverlapConfig", api.OverlapConfig, {},
         {"degree": COUNT.without(None).also((65, "between 0 and 64"))}, free=UNUSED),
    Call("DistAttnConfig", api.DistAttnConfig, {},
         {"dispatch_config": kind.config("DispatchConfig"),
          "overlap_config": kind.everything("must be an OverlapConfig", {}, 3, None),
          "magi_config": kind.config("MagiConfig").also((None, "must be a MagiConfig"))},
         free=("grpcoll_config",)),
    Call("DistAttnRuntimeKey", api.DistAttnRuntimeKey,
         {"plan": KEY.plan, "cp_group": None, "dist_attn_config": api.DistAttnConfig()},
         {"plan": kind.PLAN, "cp_group": kind.GROUP,
          "dist_attn_config": CONFIG.also((None, "must be a DistAttnConfig"))}),
    *(Call(name, getattr(api, name), {}, {}) for name in (*ALGORITHMS, "AttnRanges")),
    Call("DistAttnConfig.engine_config", api.DistAttnConfig().engine_config, {}, {}),
    Call("AttnForwardMeta", api.AttnForwardMeta, {"lse": X},
         {"lse": TENSOR, "max_logits": TENSOR.without(None)}),
]  # fmt: skip

CHECK = {"check": FLAG}
LIST = kind.everything("", 3, None, [3], [[0]], [[0, 1.5]], "ab").also((torch.tensor(3), "pairs"))


def of_range(name: str, good: dict[str, Any], kinds: dict[str, Kind], **more: Any) -> Call:
    return Call(f"AttnRange.{name}", getattr(ONE, name), good, kinds, **more)


def of_ranges(name: str, good: dict[str, Any], kinds: dict[str, Kind], **more: Any) -> Call:
    """On a list of its own, for some methods change it."""

    def call(*args: Any, **given: Any) -> Any:
        return getattr(PAIRS.clone(), name)(*args, **given)

    call.__module__ = api.AttnRanges.__module__
    call.__signature__ = inspect.signature(getattr(PAIRS, name))  # type: ignore[attr-defined]
    return Call(f"AttnRanges.{name}", call, good, kinds, **more)


RANGE_CALLS = [
    Call("AttnRange", api.AttnRange, {"start": 2, "end": 5},
         {"start": INT.also((9, "start <= end")), "end": INT.also((1, "start <= end"))}),
    of_range("from_range", {"attn_range": ONE}, {"attn_range": kind.RANGE} | CHECK,
             words={"attn_range": "range"}),
    of_ranges("from_ranges", {"ranges": [[0, 2]]}, {"ranges": LIST} | CHECK,
              words={"ranges": "range"}),
    of_ranges("from_cu_seqlens", {"cu_seqlens": [0, 4], "seq_len": 4},
              {"cu_seqlens": kind.INTS.also(([1, 4], "0"), ([], "0")), "seq_len": COUNT}),
    of_ranges("append", {"attn_range": ONE}, {"attn_range": kind.RANGE} | CHECK,
              words={"attn_range": "range"}),
    of_ranges("insert", {"idx": 0, "attn_range": ONE},
              {"idx": INT, "attn_range": kind.RANGE} | CHECK, words={"attn_range": "range"}),
    of_ranges("extend", {"attn_ranges": PAIRS}, {"attn_ranges": LIST} | CHECK,
              words={"attn_ranges": "range"}),
    of_ranges("__getitem__", {"idx": 0}, {"idx": INT}),
    of_ranges("to_cu_seqlens", {"seq_len": 16}, {"seq_len": INT.also((17, "cover"))},
              words={"seq_len": ""}),
    of_ranges("to_tensor", {}, {"device": kind.DEVICE}),
    Call("AttnMaskType.from_int_type", api.AttnMaskType.from_int_type, {"int_type": 1},
         {"int_type": COUNT.also((4, "between 0 and 3"))}),
]  # fmt: skip

CLASSES = CONFIGS + RANGE_CALLS
