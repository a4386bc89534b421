"""What README and docs name exists."""

import re
from pathlib import Path

import pytest

from tools import update_readme

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOP = (
    "megatron_magi/",
    "scripts/",
    "tools/",
    "docs/",
    "recipes/",
    "tests/",
    "patches/",
    "benchmarks/",
    "examples/",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)", text)
    named = [
        word.rstrip(".,:;)")
        for code in re.findall(r"`([^`\n]+)`", text)
        for word in code.split()
        if word.startswith(TOP) and not set(word) & set("*<>{}$")
    ]
    local = [p for p in links if not re.match(r"[a-z]+:", p)]
    assert not [p for p in local if not (page.parent / p).exists()]
    assert not [p for p in named if not (ROOT / p).exists()]
    modules = re.findall(r"python -m ((?:benchmarks|tools)\.[\w.]+)", text)
    assert not [m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").exists()]


def test_every_page_is_reachable_from_the_readme() -> None:
    text = "".join(p.read_text() for p in PAGES)
    for page in PAGES[1:]:
        assert page.name in text.replace(f"# {page.name}", ""), f"nothing links to {page.name}"


def test_tables_are_made_from_the_newest_records() -> None:
    assert update_readme.main(["--check"]) == 0, "run python -m tools.update_readme"
