"""The table of distributed attention, from the newest record of bench_dist_attn.py."""

from __future__ import annotations

from readme_records import newest, source

SHOWN = {
    "ours": "ours",
    "kernels": "kernels alone",
    "all_gather": "contiguous all-gather",
    "all_gather_zigzag": "zigzag all-gather",
    "one_gpu": "one GPU",
}
NO_ZIGZAG = (
    "The contiguous all-gather is not balanced where rows see different numbers of keys, so a good "
    "part of the distance to it is balance alone. The balanced rival, a zigzag all-gather "
    "(`all_gather_zigzag`), has not been measured in a record of ours yet."
)


def dist_table() -> str:
    """One line per mask and length; a cell: forward / backward in TFLOP/s per GPU."""
    record = newest("dist")
    if record is None:
        return "No record yet: run `scripts/bench_dist_attn.py` on a host with several GPUs.\n"
    cells = {
        (r["mask"], r["tokens"], r["ranks"], r["impl"], r["direction"]): r for r in record["rows"]
    }
    impls = [impl for impl in SHOWN if any(r["impl"] == impl for r in record["rows"])]
    heads = [*(SHOWN[impl] for impl in impls), "forward", "stages in backward", "rows received"]
    lines = [
        f"| mask | GPUs x tokens | {' | '.join(heads)} |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for mask, tokens, ranks in dict.fromkeys(key[:3] for key in cells):
        ours = cells[mask, tokens, ranks, "ours", "fwd"]
        received = max(ours["received_rows"]) / (tokens * (ranks - 1))
        shown = [
            " / ".join(
                f"{cells[mask, tokens, ranks, impl, d]['tflops']:.0f}" for d in ("fwd", "bwd")
            )
            for impl in impls
        ]
        facts = [f"`{ours['forward_mode']}`", str(ours["overlap_degree"] + 1), f"{received:.0%}"]
        cell = " | ".join([*shown, *facts])
        lines.append(f"| `{mask}` | {ranks} x {tokens // 1024}k | {cell} |")
    note = (
        "A cell has forward / backward in TFLOP/s per GPU on visible area of the slowest rank. "
        "Rows received are those of the fullest rank, in percent of a ring's."
    )
    if "all_gather_zigzag" not in impls:
        note += f" {NO_ZIGZAG}"
    return "\n".join([*lines, "", note, source(record)]) + "\n"
