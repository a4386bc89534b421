"""Balance, traffic, stages and memory of a mask at any number of ranks; needs no GPU.

examples:
  megatron-magi plan --lengths 32768 --cp 4                        one causal document
  megatron-magi plan --lengths 8192x4,1000,500x8 --cp 8 --window 1024
  megatron-magi plan --cu-seqlens @documents.txt --cp 64 --quiet
  megatron-magi plan --data runs/data/python_stdlib --seq-length 32768 --cp 8
  megatron-magi plan --data PREFIX --seq-length 32768 --gpus 64 --layouts     DP, CP or both?
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from megatron_magi.cli.mask_source import PlanInput, add_mask_options, plan_input, refuse_empty
from megatron_magi.cli.parser import UsageError, add_output_options

if TYPE_CHECKING:  # the options and their help need no torch
    from megatron_magi.core.plan import AttnPlan
    from megatron_magi.viz.plan_facts import LayoutFacts, Layouts

LAYOUT_OPTIONS = (
    *("gpus", "gpus_per_node", "tp", "pp", "batch"),
    *("model", "memory", "steps", "replicas_meet"),
)
"""Options that `plan --layouts` alone reads."""
MAX_ROWS = 16
"""Ranks shown in tables; the JSON has all of a plan."""
MAX_REPORT = 2**32
"""Steps of work in a report, about a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mask_options(parser)
    _add_layout_options(parser)
    add_output_options(parser)


def _add_layout_options(parser: argparse.ArgumentParser) -> None:
    """The options of `plan --layouts`."""
    group = parser.add_argument_group("divisions of a job's GPUs, instead of one plan")
    group.add_argument("--layouts", action="store_true",
                       help="compare DP, CP, joined and dealt samples for --data")  # fmt: skip
    group.add_argument("--gpus", type=int, help="of the job")
    group.add_argument("--gpus-per-node", type=int, help="of a host (default 8)")
    group.add_argument("--tp", type=int, help="tensor parallel size (default 1)")
    group.add_argument("--pp", type=int, help="pipeline parallel size (default 1)")
    group.add_argument("--batch", type=int, help="samples of a step (default: one a rank)")
    group.add_argument("--model", metavar="LAYERS,HIDDEN,FFN,VOCAB",
                       help="sizes of the whole model (default 32,4096,14336,128256)")  # fmt: skip
    group.add_argument("--memory", type=float, metavar="GIB", help="of a GPU (default 80)")
    group.add_argument("--steps", type=int, help="steps to price (default 50)")
    group.add_argument("--replicas-meet", action="store_true",
                       help="experts or weights are spread over replicas")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Plan, print, 0."""
    if options.layouts:
        from megatron_magi.cli import layouts

        return layouts.run(options)
    _refuse_layout_options(options)
    given = plan_input(options)
    refuse_empty(given, "a plan")
    began = time.perf_counter()
    plan = make_plan(given)
    plan_ms = (time.perf_counter() - began) * 1e3
    _check_report(plan)
    facts = plan_facts(given, plan, make_layouts(given, plan), plan_ms)
    if options.json:
        print(json.dumps(facts, indent=1))
    elif options.quiet:
        print(_one_line(facts))
    else:
        print(_report(facts, plan))
    return 0


def _refuse_layout_options(options: argparse.Namespace) -> None:
    found = [name for name in LAYOUT_OPTIONS if getattr(options, name)]
    if found:
        raise UsageError(
            f"--{found[0].replace('_', '-')} requires --layouts, got a plan of one mask; pass "
            f"--layouts with --data, or leave it out"
        )


def _check_report(plan: AttnPlan) -> None:
    """Refuse a plan whose report takes minutes: it visits all transfers for every rank, and all
    pairs of chunks."""
    num_chunks, num_transfers = len(plan.layout.chunk_ranks), len(plan.transfers)
    if num_chunks**2 + 2 * plan.cp_size * num_transfers > MAX_REPORT:
        raise UsageError(
            f"the report looks at all ranks, which takes minutes for {num_chunks:,} chunks and "
            f"{num_transfers:,} transfers between {plan.cp_size:,} ranks; pass a larger "
            f"--chunk-size than {plan.layout.chunk_size:,}, or a smaller --cp"
        )


def make_layouts(given: PlanInput, plan: AttnPlan) -> Layouts:
    """The plan and the usual layouts of the same mask."""
    from megatron_magi.viz.plan_facts import compare_layouts, zigzag_layout

    usual = zigzag_layout(given.mask.total_seqlen_q, given.cp_size)
    return compare_layouts(plan, make_plan(given, layout=usual))


def make_plan(given: PlanInput, **layout: Any) -> AttnPlan:
    """The plan of the input, on a token layout that it chooses or on this one."""
    from megatron_magi.core.plan import make_attn_plan

    if not layout:
        layout = {"token_multiple": given.token_multiple}
    try:
        return make_attn_plan(given.mask, given.cp_size, given.head_shape, given.config, **layout)
    except ValueError as error:
        raise UsageError(str(error)) from error


def plan_facts(
    given: PlanInput, plan: AttnPlan, layouts: Layouts, plan_ms: float
) -> dict[str, Any]:
    """Everything the report says, as plain values."""
    from megatron_magi.core.plan.peer_rows import rows_between
    from megatron_magi.viz.plan_facts import ring_rows

    heads, ring = plan.head_shape, ring_rows(plan)
    return {
        "mask": _mask_facts(given),
        "plan": {**_layout_of_plan(plan, plan_ms), **_exchange_of_plan(plan, ring)},
        "layouts": {name: _layout_facts(one, ring) for name, one in layouts.items()},
        "heads": {"q": heads.num_heads_q, "kv": heads.num_heads_kv, "dim": heads.head_dim,
                  "value_dim": heads.value_dim, "bytes_per_element": heads.bytes_per_element},
        "ring_rows_per_rank": ring,
        "ranks": _rank_facts(plan),
        "rows_from_rank_to_rank": rows_between(plan.transfers, plan.cp_size).tolist(),
    }  # fmt: skip


def _mask_facts(given: PlanInput) -> dict[str, Any]:
    mask = given.mask
    return {
        "text": given.text,
        "tokens": mask.total_seqlen_q,
        "slices": mask.num_slices,
        "visible_cells": mask.area(),
        "visible_share": _ratio(mask.area(), mask.total_seqlen_q * mask.total_seqlen_k),
    }


def _layout_of_plan(plan: AttnPlan, plan_ms: float) -> dict[str, Any]:
    layout = plan.layout
    return {
        "cp_size": plan.cp_size,
        "chunk_size": layout.chunk_size,
        "tokens_per_rank": layout.num_local_tokens,
        "padding_tokens": layout.padded_seqlen - layout.total_seqlen,
        "overlap_degree": plan.overlap_degree,
        "forward_mode": plan.forward_mode,
        "imbalance": plan.imbalance,
        "digest": f"{plan.digest:016x}",
        "planning_ms": plan_ms,
    }


def _exchange_of_plan(plan: AttnPlan, ring: int) -> dict[str, Any]:
    from megatron_magi.core.plan import predict_times
    from megatron_magi.viz.plan_facts import rows_between_nodes

    times = predict_times(plan)
    crossing, by_reader = rows_between_nodes(plan)
    return {
        "rows_of_ring": _ratio(plan.rows_received.sum(), ring * plan.cp_size),
        "ranks_per_node": plan.ranks_per_node,
        "rows_between_nodes": crossing,
        "rows_between_nodes_by_reader": by_reader,
        "model_forward_us": times.forward_us,
        "model_backward_us": times.backward_us,
        "model_exposed_share": times.exposed_share,
    }


def _rank_facts(plan: AttnPlan) -> list[dict[str, Any]]:
    from megatron_magi.viz.plan_facts import receive_bytes, stage_rows

    received, buffers = plan.rows_received, receive_bytes(plan)
    return [
        {
            "tiles": int(plan.loads[rank]),
            "load": _ratio(plan.loads[rank] * plan.cp_size, plan.loads.sum()),
            "rows_received": int(received[rank]),
            "rows_by_stage": rows.tolist(),
            "receive_buffer_bytes": int(buffers[rank]),
        }
        for rank, rows in enumerate(stage_rows(plan))
    ]


def _layout_facts(layout: LayoutFacts | None, ring: int) -> dict[str, Any] | None:
    if layout is None:
        return None
    received, needed = layout.rows_received, layout.rows_needed
    return {
        "imbalance": layout.imbalance,
        "rows_received": float(received.mean()),
        "rows_received_of_ring": _ratio(received.sum(), ring * layout.cp_size),
        "rows_needed": float(needed.mean()),
        "rows_needed_of_ring": _ratio(needed.sum(), ring * layout.cp_size),
        "padding_tokens": layout.padding_tokens,
    }


def _one_line(facts: dict[str, Any]) -> str:
    plan = facts["plan"]
    return (
        f"cp {plan['cp_size']}: balance (max/mean) {plan['imbalance']:.3f}, rows received "
        f"{plan['rows_of_ring']:.1%} of a ring's, {plan['overlap_degree']} remote stages"
    )


def _report(facts: dict[str, Any], plan: AttnPlan) -> str:
    mask, head, p = facts["mask"], facts["heads"], facts["plan"]
    buffer = max(rank["receive_buffer_bytes"] for rank in facts["ranks"])
    values = "" if head["value_dim"] == head["dim"] else f", values of {head['value_dim']}"
    lines = [
        f"mask      {mask['text']}",
        f"          {mask['slices']:,} slice{'s' * (mask['slices'] != 1)}, "
        f"{mask['visible_share']:.2%} of all cells visible",
        f"plan      cp {p['cp_size']}, {p['tokens_per_rank']:,} tokens a rank in chunks of "
        f"{p['chunk_size']:,}, padding {p['padding_tokens']:,}; made in {p['planning_ms']:.1f} ms",
        f"balance   max/mean {p['imbalance']:.3f}",
        f"traffic   {p['rows_of_ring']:.1%} of the key rows a ring moves",
        *_nodes_text(p),
        f"stages    {_stages_text(p)}",
        f"memory    receive buffers up to {buffer / 2**20:.1f} MiB a rank "
        f"(heads {head['q']}/{head['kv']} of {head['dim']}{values}, "
        f"{head['bytes_per_element']} bytes)",
        f"model     forward {p['model_forward_us']:.0f} us a layer, "
        f"{p['model_exposed_share']:.0%} of its transfer time exposed; backward "
        f"{p['model_backward_us']:.0f} us (cost table, not measured)",
        "",
        *_layout_table(facts["layouts"]),
        "",
        *_rank_table(facts),
    ]
    if plan.cp_size <= MAX_ROWS and plan.cp_size > 1:
        lines += ["", *_traffic_table(facts["rows_from_rank_to_rank"])]
    return "\n".join(lines)


def _layout_table(layouts: dict[str, Any]) -> list[str]:
    """Balance, mean key rows of a rank (of a ring's) and padding, ours last."""
    from megatron_magi.viz.plan_facts import (
        NO_DOCUMENTS,
        OURS,
        PER_DOCUMENT,
        PER_SEQUENCE,
        WHY_MORE_ROWS,
    )

    lines = [f"{'layout':<20} {'max/mean':>8} {'rows received':>19} {'rows needed':>19} "
             f"{'padding':>8}"]  # fmt: skip
    for name, one in layouts.items():
        cells = ["-"] * 4 if one is None else [
            f"{one['imbalance']:.3f}",
            f"{one['rows_received']:,.0f} {one['rows_received_of_ring']:7.1%}",
            f"{one['rows_needed']:,.0f} {one['rows_needed_of_ring']:7.1%}",
            f"{one['padding_tokens']:,}",
        ]  # fmt: skip
        lines.append(f"{name:<20} {cells[0]:>8} {cells[1]:>19} {cells[2]:>19} {cells[3]:>8}")
    if layouts[PER_DOCUMENT] is None:
        lines.append(f"({NO_DOCUMENTS})")
    if layouts[OURS]["rows_received"] > layouts[PER_SEQUENCE]["rows_needed"]:
        lines.append(f"({OURS} receives more than {PER_SEQUENCE} needs. {WHY_MORE_ROWS})")
    return lines


def _nodes_text(p: dict[str, Any]) -> list[str]:
    if not p["ranks_per_node"]:
        return []
    return [
        f"nodes     {p['cp_size'] // p['ranks_per_node']} of {p['ranks_per_node']} ranks; "
        f"{p['rows_between_nodes']:,} key rows cross between them "
        f"({p['rows_between_nodes_by_reader']:,} if each reader received its own)"
    ]


def _stages_text(p: dict[str, Any]) -> str:
    degree = p["overlap_degree"]
    parts = f"received keys in {degree} stage{'s' * (degree > 1)}"
    forward = {
        "at_once": "everything is received first",
        "local_first": "rows that see own keys only, then the others",
        "staged": f"own keys, then {parts}, merged" if degree else "everything is received first",
    }[p["forward_mode"]]
    backward = f"{parts}, then own keys" if degree else "everything is received first"
    return f"forward: {forward}; backward: {backward}"


def _rank_table(facts: dict[str, Any]) -> list[str]:
    lines = [f"{'rank':>4} {'load':>6} {'tiles':>10} {'received':>10} {'of ring':>8} "
             f"{'buffer MiB':>11}  rows by stage"]  # fmt: skip
    for number, rank in enumerate(facts["ranks"][:MAX_ROWS]):
        share = _ratio(rank["rows_received"], facts["ring_rows_per_rank"])
        stages = " + ".join(f"{rows:,}" for rows in rank["rows_by_stage"] if rows) or "-"
        lines.append(
            f"{number:>4} {rank['load']:>6.3f} {rank['tiles']:>10,} {rank['rows_received']:>10,} "
            f"{share:>8.1%} {rank['receive_buffer_bytes'] / 2**20:>11.1f}  {stages}"
        )
    if len(facts["ranks"]) > MAX_ROWS:
        lines.append(f" ... {len(facts['ranks']) - MAX_ROWS} more ranks; --json has all")
    return lines


def _traffic_table(rows: list[list[int]]) -> list[str]:
    width = max(5, *(len(f"{n:,}") for line in rows for n in line)) + 1
    lines = ["key rows from rank (down) to rank (across)"]
    lines.append("     " + "".join(f"{j:>{width}}" for j in range(len(rows))))
    for i, line in enumerate(rows):
        cells = ("." if i == j else f"{n:,}" for j, n in enumerate(line))
        lines.append(f"{i:>4} " + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
