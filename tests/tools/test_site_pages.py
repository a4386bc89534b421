"""The site's pages: every page of docs/, with links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import site_pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("folder", "link", "there"),
    [
        (".", "docs/design/planner.md#limits", "design/planner.md#limits"),
        ("docs/guides", "masks.md", "masks.md"),
        ("docs/guides", "../design/planner.md", "../design/planner.md"),
        ("docs/guides", "../../README.md#file-map", "../index.md#file-map"),
        ("docs/guides", "../images/viz.png", "../images/viz.png"),
        (".", "docs/images/viz.png", "images/viz.png"),
        ("docs/guides", "../../examples/own_loop.py", "https://here/examples/own_loop.py"),
        (".", "https://example.org/x.md", "https://example.org/x.md"),
    ],
)
def test_links_fit_the_site(folder: str, link: str, there: str) -> None:
    got = site_pages.with_links(f"see [it]({link}).", Path(folder), "https://here")
    assert got == f"see [it]({there})."


def test_links_of_a_whole_site_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    monkeypatch.setattr("sys.argv", ["site_pages.py", str(site)])
    assert site_pages.main() == 0
    pages = list(site.rglob("*.md"))
    assert len(pages) == len(site_pages.PAGES)
    for page in pages:
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        local = [link for link in links if not re.match(r"[a-z]+:", link)]
        assert not [link for link in local if not (page.parent / link).exists()], page.name


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"[\w/]+\.md", menu.partition("nav:")[2])
    assert sorted(named) == sorted(site_pages.PAGES.values())
