"""Builds the generated parts of the docs: tables and screens from the code, and docs/images.

python -m tools.build_docs            # write all; needs megatron-core and matplotlib
python -m tools.build_docs --check    # exit code 1 if a table of the launcher differs

mkdocstrings fills docs/reference/api.md when the site is built (build_site.sh).
"""

from __future__ import annotations

from pathlib import Path

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser
from tools.docs_launcher import TABLES
from tools.docs_text import fill_tables

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_PAGES = (ROOT / "docs" / "reference/flags.md", ROOT / "docs" / "design/launcher.md")
IMAGES = ROOT / "docs" / "images"


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--no-pictures", action="store_true", help="text only")
    options = parser.parse_args(argv)
    pages = {page: fill_tables(page.read_text(), TABLES) for page in LAUNCHER_PAGES}
    if options.check:
        stale = [page for page, text in pages.items() if page.read_text() != text]
        for page in stale:
            print(f"{page.relative_to(ROOT)} differs from the code; run python -m tools.build_docs")
        return int(bool(stale))
    for page, text in pages.items():
        page.write_text(text)
        print(f"wrote {page.relative_to(ROOT)}")
    from tools.docs_tables import update_page

    for name in ("guides/tuning.md", "reference/cli.md"):
        update_page(ROOT / "docs" / name)
        print(f"wrote the tables and screens of docs/{name}")
    if not options.no_pictures:
        from tools.docs_figures import draw_all

        for path in draw_all(IMAGES):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
