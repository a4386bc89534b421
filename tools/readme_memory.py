"""The table of memory records: what a dry run estimates beside what a GPU's allocator gave out."""

from __future__ import annotations

from benchmarks.train.memory_parts import parts
from tools.readme_records import records, source


def memory_table() -> str:
    """One line per case, of the rank whose estimate is furthest off; later records win."""
    found = records("memory")
    rows = {(r["config"], r["rank"]): r for record in found for r in record["rows"]}
    if not rows:
        return "No record yet: run `python -m benchmarks.train.memory` on a GPU.\n"
    lines = [
        "| run | GPUs | weights and gradients | optimizer | step | peak | estimated / measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(config for config, _ in rows):
        ranks = [r for (config, _), r in rows.items() if config == name]
        row = max(ranks, key=lambda r: abs(r["ratio"] - 1))
        cells = [f"{e / 2**30:.2f} / {m / 2**30:.2f}" for e, m in parts(row)]
        lines.append(f"| `{name}` | {row['ranks']} | {' | '.join(cells)} | {row['ratio']:.3f} |")
    note = "A cell has estimated / measured GiB of the rank that is furthest off."
    return "\n".join([*lines, "", note, *map(source, found)]) + "\n"
