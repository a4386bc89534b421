"""Copies the documentation's pages into one folder, their links made to fit a site.

    python -m tools.site_pages build/site_pages [ADDRESS]

Links between pages stay; links to other files of the repository begin with its ADDRESS, by default
with that of this checkout on this machine, because mkdocs takes a relative one for a missing page.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
    },
}
"""Paths in the repository, and paths on the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the pages, made anew")
    parser.add_argument("address", nargs="?", default=ROOT.as_uri(), help="URL of the repository")
    args = parser.parse_args()
    target, address = args.target, args.address
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "images", target / "images")
    for source, name in PAGES.items():
        text = (ROOT / source).read_text()
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(with_links(text, Path(source).parent, address))
    print(f"{len(PAGES)} pages in {target}")
    return 0


def with_links(text: str, folder: Path, address: str) -> str:
    """The page's text; `folder` is where it lies in the repository."""
    place = folder.relative_to("docs") if folder.parts else folder
    top = "../" * len(place.parts)

    def change(match: re.Match[str]) -> str:
        begin, link, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", link):
            return match[0]
        path = os.path.normpath(folder / link)
        if path in PAGES:
            return f"{begin}{os.path.relpath(PAGES[path], place)}{anchor})"
        if path.startswith("docs/images/"):
            return f"{begin}{top}{path.removeprefix('docs/')})"
        return f"{begin}{address}/{path}{anchor})"

    return LINK.sub(change, text)


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
