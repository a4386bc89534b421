"""Classes of `megatron_magi`, and their methods."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

import megatron_magi as magi
from megatron_magi.core.plan.derived_cache import DerivedCache
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.engine_arguments import MASK, PLAN, Q
from tests.edge.kinds import COUNT, FLAG, INF, INT, NAN, POSITIVE, TENSOR

TREE = magi.PrefixTree((3, 3, 2), (-1, 0, 0))
EDGES = magi.tree_edges(TREE, magi.plan(TREE.mask(), 1, magi.HeadShape(2, 1, 8)), None)
AREA = (("q_start", 0), ("q_end", 4), ("k_start", 0), ("k_end", 4), ("d_lo", -3), ("d_hi", 3))
WIDE = INT.also((2**40, "between"))
RATE = kind.NUMBER.also((NAN, "finite"), (INF, "finite"), (0, "0"), (-1.0, "-1"))


def plan_fields() -> Call:
    """An AttnPlan by hand, as a pickle makes it."""
    good = {f.name: getattr(PLAN, f.name) for f in fields(PLAN) if f.init}
    arrays = kind.everything("", [[0]], None, np.zeros((1, 2), np.int32), np.zeros((1, 5)))
    return Call(
        "AttnPlan",
        magi.AttnPlan,
        good,
        {
            "mask": kind.MASK,
            "layout": kind.LAYOUT,
            "head_shape": kind.HEADS,
            "config": kind.config("MagiConfig"),
            "overlap_degree": COUNT,
            "forward_mode": kind.WORD,
            "transfers": arrays,
            "loads": arrays,
            "digest": COUNT,
            "field_digests": kind.everything("dict", [1], "ab", None),
            "cross_layout": kind.LAYOUT.without(None),
            "query_transfers": arrays,
            "_kept": kind.KEPT,
        },
    )


CLASSES = [
    plan_fields(),
    Call("AttnPlan.rank_plan", PLAN.rank_plan, {"rank": 0}, {"rank": COUNT.also((1, "got 1"))}),
    Call(
        "AttnForwardMeta",
        magi.AttnForwardMeta,
        {"lse": Q, "max_logits": None},
        {"lse": TENSOR, "max_logits": TENSOR.without(None)},
    ),
    Call(
        "Softmax",
        magi.Softmax,
        {},
        {"scale": kind.SCALE, "softcap": kind.SOFTCAP, "sink": TENSOR.without(None)},
    ),
    Call(
        "Softmax.numbers",
        magi.Softmax().numbers,
        {"q": Q},
        {"q": TENSOR.also((torch.tensor(3.0), "head_dim"), (torch.zeros(4, 2, 0), "head_dim"))},
    ),
    Call(
        "AttnMask",
        magi.AttnMask,
        {"slices": MASK.slices, "total_seqlen_q": 16, "total_seqlen_k": 16},
        {
            "slices": kind.everything("slices must", 3, None, [[0, 1]], [[0.5] * 6], [[True] * 6])
            .also((magi.AttnSlice(0, 1, 0, 1), "list"))
            .also((np.full((1, 6), 2**64 - 1, np.uint64), "int64")),
            "total_seqlen_q": COUNT.also((2**40, "int32")),
            "total_seqlen_k": COUNT.also((2**40, "int32")),
        },
    ),
    Call("AttnSlice", magi.AttnSlice, dict(AREA), {name: WIDE for name, _ in AREA}),
    Call(
        "AttnSlice.cut",
        magi.AttnSlice(**dict(AREA)).cut,
        dict(AREA[:4]),
        {name: WIDE for name, _ in AREA[:4]},
    ),
    Call(
        "AttnSlice.shift",
        magi.AttnSlice(**dict(AREA)).shift,
        {"dq": 1, "dk": 2},
        {"dq": INT.also((2**40, "between")), "dk": INT.also((2**40, "between"))},
        words={"dq": "", "dk": ""},
    ),
    Call(
        "TokenLayout",
        magi.TokenLayout,
        {
            "total_seqlen": 15,
            "chunk_size": 4,
            "cp_size": 2,
            "chunk_ranks": [0, 1, 1, 0],
            "_kept": DerivedCache(),
        },
        {
            "_kept": kind.KEPT,
            "total_seqlen": COUNT,
            "chunk_size": POSITIVE.also((1, "cover")),
            "cp_size": POSITIVE,
            "chunk_ranks": kind.INTS.also(
                ([2**40] * 2, "int32"),
                ([], "chunks"),
                ([0, 1, 1, 2], "cp_size = 2"),
            ),
        },
    ),
    Call("TokenLayout.local_ranges", PLAN.layout.local_ranges, {"rank": 0}, {"rank": COUNT}),
    Call("TokenLayout.position_ids", PLAN.layout.position_ids, {"rank": 0}, {"rank": COUNT}),
    Call("TokenLayout.check_rank", PLAN.layout.check_rank, {"rank": 0}, {"rank": COUNT}),
    Call(
        "PrefixTree",
        magi.PrefixTree,
        {"node_lengths": (2, 3, 3), "parents": (-1, 0, 0)},
        {"node_lengths": kind.INTS, "parents": kind.INTS},
    ),
    Call(
        "PrefixTree.of_answers",
        magi.PrefixTree.of_answers,
        {"prompt_length": 3, "answer_lengths": [2, 1]},
        {"prompt_length": POSITIVE, "answer_lengths": kind.INTS},
    ),
    Call("PrefixTree.mask", TREE.mask, {}, {}),
    Call("PrefixTree.positions", TREE.positions, {}, {}),
    Call("PrefixTree.predecessors", TREE.predecessors, {}, {}),
    Call("PrefixTree.branches", TREE.branches, {}, {}),
    Call("PrefixTree.rows_of", TREE.rows_of, {"nodes": [0, 1]}, {"nodes": kind.INTS}),
    Call(
        "TreeEdges",
        magi.TreeEdges,
        {"sources": EDGES.sources, "targets": EDGES.targets},
        {"sources": kind.INT_TENSOR, "targets": kind.INT_TENSOR},
    ),
    Call(
        "TreeEdges.logprobs",
        EDGES.logprobs,
        {"logits": torch.zeros(8, 5), "tokens": torch.zeros(8, dtype=torch.int64)},
        {"logits": TENSOR, "tokens": kind.INT_TENSOR},
    ),
    Call(
        "HeadShape",
        magi.HeadShape,
        {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "head_dim_v": 4},
        {
            "num_heads_q": POSITIVE,
            "num_heads_kv": POSITIVE,
            "head_dim": POSITIVE.also((2**40, "integer")),
            "bytes_per_element": POSITIVE,
            "head_dim_v": POSITIVE.without(None),
        },
    ),
    Call(
        "CostTable",
        magi.CostTable,
        {},
        {
            "tile_q": POSITIVE,
            "tile_k": POSITIVE,
            **dict.fromkeys(
                ("link_gib_s", "node_link_gib_s", "kernel_tflops", "memory_gib_s"), RATE
            ),
            "ranks_per_node": POSITIVE.without(None),
            "swap_trials": COUNT.without(None),
            "stage_latency_us": kind.NUMBER.also((NAN, "finite"), (INF, "finite"), (-1, "-1")),
        },
    ),
    Call(
        "MagiConfig",
        magi.MagiConfig,
        {},
        {
            "chunk_size": POSITIVE.without(None).also((2**40, "2147483647")),
            "transport": kind.WORD,
            "max_imbalance": kind.NUMBER.without(None).also((NAN, ">= 1.0"), (0.5, ">= 1.0")),
            "overlap_degree": COUNT.without(None),
            "forward_mode": kind.WORD.without(None),
            "costs": kind.config("CostTable").also((None, "must be a CostTable")),
            "agreement_timeout_s": RATE,
            "kernel_backend": kind.WORD,
            "deterministic": FLAG,
            "dkv_reduce_in_fp32": FLAG,
            "keep_received_keys": FLAG,
            "send_queries": FLAG.without(None),
        },
    ),
]
