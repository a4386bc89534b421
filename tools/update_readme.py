"""Rewrites the measured tables of README and docs from the newest records in benchmarks/records/.

    python -m tools.update_readme [--check]

A table stands between `<!-- record NAME -->` and `<!-- end -->`; numbers are never typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_magi import HeadShape
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from tools.readme_dist import dist_table, packs_table
from tools.readme_index import index_table
from tools.readme_jobs import jobs_table
from tools.readme_kernel import host_table, kernel_peers, kernel_summary
from tools.readme_llama import curves_table, gradients_table, held_out_table
from tools.readme_pretrain import agreement_table, flags_table
from tools.readme_records import RECORDS, ROOT, newest, source
from tools.readme_te import attention_table, step_profile_table, step_table, whole_step_table

PAGES = [ROOT / "README.md", RECORDS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def planner_table() -> str:
    """Rows received and balance of LPT and the search; documents cut at a quarter."""
    record = newest("planner")
    if record is None:
        return "No record yet: run `python -m benchmarks.planner.plans`.\n"
    methods = ("lpt_2048", "lpt_fine", "swap_fine", "swap_auto")
    lines = [
        "| documents | cp | tokens per rank | LPT, chunk 2048 | LPT, chunk 512 | search, chunk 512 "
        "| search, chosen chunk | plan, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["what"] != "quality" or not row["cut"]:
            continue
        shown = [f"{row[m]['received_own']:.2f} / {row[m]['imbalance_max']:.3f}" for m in methods]
        head = [row["distribution"], str(row["cp_size"]), f"{row['tokens_per_rank'] // 1024}K"]
        time = f"{row['swap_auto']['plan_ms_p50']:.1f}"
        lines.append("| " + " | ".join([*head, *shown, time]) + " |")
    note = (
        "A cell has rows received / highest imbalance of the packs. The time is the median with "
        "the chosen chunk."
    )
    return "\n".join([*lines, "", note, source(record)]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "kernel": kernel_summary,
    "kernel peers": kernel_peers,
    "host": host_table,
    "planner": planner_table,
    "dist": dist_table,
    "dist packs": packs_table,
    "pretrain agreement": agreement_table,
    "pretrain flags": flags_table,
    "published jobs": jobs_table,
    "index": index_table,
    "curves": curves_table,
    "gradients": gradients_table,
    "held out": held_out_table,
    "te attention": attention_table,
    "te attention short": lambda: attention_table(tokens=16384),
    "te attention of small heads": lambda: attention_table(HeadShape(32, 8, 64), notes=False),
    "te attention of one key head": lambda: attention_table(HeadShape(8, 1, 128), notes=False),
    "te steps": step_table,
    "te whole steps": whole_step_table,
    "te step profile": step_profile_table,
}


def rewrite(text: str, root: str = "") -> str:
    """The page with every known table made anew; ``root`` leads from it to the repository."""

    def fill(match: re.Match[str]) -> str:
        table = TABLES[match[1]]().replace("](benchmarks/", f"]({root}benchmarks/")
        return f"<!-- record {match[1]} -->\n{table}<!-- end -->"

    return re.sub(r"<!-- record ([a-z ]+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    args = parser.parse_args()
    stale = {}
    for page in PAGES:
        old = page.read_text()
        new = rewrite(old, "../" * len(page.relative_to(ROOT).parent.parts))
        if new != old:
            stale[page] = new
    if args.check:
        return len(stale)
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
