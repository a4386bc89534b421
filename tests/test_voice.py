"""Docstrings and pages keep to plain English, so that a Megatron user reads them once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "megatron_magi").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
]
OPENINGS = ("What ", "Which ", "Whether ")
"""A docstring begins with a verb or with a noun, not with a question."""
GONE = r"\bours\b|\bof ours\b|\bthe own trainer\b|\bis put right\b|\bdrawn ahead of\b"
MOST_WORDS = 40


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, also of fields and constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def test_no_docstring_begins_with_a_question() -> None:
    found = [(path, line, text) for path in SOURCES for line, text in strings_of(path)]
    assert not [f"{path}:{line}: {text[:60]}" for path, line, text in found
                if text.startswith(OPENINGS)]  # fmt: skip


def prose_of(text: str) -> str:
    """A page without its generated tables, code and links' targets."""
    text = re.sub(r"<!-- (?:record|table|screen) .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```|^ {4}.*?$", "", text, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences_of(prose: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n(?=[-#>*\d])", prose)
    return [
        " ".join(sentence.split()) for block in blocks for sentence in re.split(r"[.:;?!]\s", block)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_read_once(page: Path) -> None:
    prose = prose_of(page.read_text())
    assert not re.findall(GONE, prose, re.I)
    running = re.sub(r"^\|.*?$", "", prose, flags=re.M)
    assert not [s for s in sentences_of(running) if len(s.split()) > MOST_WORDS]
