"""Rewrites the measured tables of README and docs from the newest records in benchmarks/records/.

    python -m tools.update_readme [--check]

A table stands between `<!-- record NAME -->` and `<!-- end -->`; numbers are never typed by hand.
"""

from __future__ import annotations

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from tools.docs_text import fill_tables
from tools.readme_records import RECORDS, ROOT
from tools.tables import TABLES

PAGES = [ROOT / "README.md", RECORDS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    args = parser.parse_args(argv)
    stale = 0
    for page in PAGES:
        text, root = page.read_text(), "../" * len(page.relative_to(ROOT).parent.parts)
        new = fill_tables(text, TABLES, "record").replace("](benchmarks/", f"]({root}benchmarks/")
        if new != text:
            stale += 1
            if not args.check:
                page.write_text(new)
    return stale if args.check else 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
