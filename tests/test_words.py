"""The glossary is short, sorted and true, and the pages keep to its words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "reference/glossary.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "megatron_magi" / "csrc").rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_WORDS = 40
SOURCES = (".py", ".h", ".cpp", ".cu", ".cuh")

BANNED = {
    r"\bthe field(?:'s (?:published|four|types|codes)| (?:writes|defines))\b": "MagiAttention",
    r"\bthe reference system\b": "MagiAttention",
    r"\breference runs?\b": "baseline",
    r'(?<!")\bflex\b(?!")': "attention, or our kernel; `flex` in code type is PyTorch's",
    r"\b(?:same|one|package's) dispatch\b(?! plan)": "token layout",
}
"""What no page says, and what it says instead."""

Row = tuple[str, str, list[str]]


def rows_of(text: str) -> list[Row]:
    """(word, meaning, names in code) of every line of the glossary's table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(word, meaning, re.findall(r"`([^`]+)`", names)) for word, meaning, names in lines[1:]]


def faults(rows: list[Row], known: set[str]) -> list[str]:
    """What is wrong with a glossary; `known` are the names that the code has."""
    words = [word.casefold() for word, _, _ in rows]
    found = [] if len(words) <= MOST_WORDS else [f"{len(words)} words are more than {MOST_WORDS}"]
    found += [f"{b} stands behind {a}" for a, b in itertools.pairwise(words) if b < a]
    found += [
        f"{word} stands there twice" for word in sorted({w for w in words if words.count(w) > 1})
    ]
    for word, meaning, names in rows:
        if not names:
            found.append(f"{word} names nothing in the code")
        if not meaning.endswith(".") or len(meaning) > 200:
            found.append(f"{word} is not told in a sentence or two")
        found += [f"{word}: the code has no {name}" for name in names if name not in known]
    return found


def banned_in(text: str) -> list[str]:
    """Banned phrases in prose: generated tables, code blocks and code words are left out."""
    prose = re.sub(r"<!-- (?:record|table|screen) .*?<!-- end -->", "", text, flags=re.S)
    prose = re.sub(r"^```.*?^```|^ {4}.*?$|`[^`\n]*`", "", prose, flags=re.S | re.M)
    prose = " ".join(prose.split())
    return [
        f"{match[0]!r}: say {instead}"
        for phrase, instead in BANNED.items()
        for match in re.finditer(phrase, prose, re.I)
    ]


@cache
def names_in_code() -> set[str]:
    folders = ("megatron_magi", "scripts", "benchmarks", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    sources = [path for path in paths if path.suffix in SOURCES]
    stems = {path.stem for path in sources}
    return stems.union(*(re.findall(r"\w+", path.read_text()) for path in sources))


def test_the_glossary_is_sorted_short_and_names_what_exists() -> None:
    rows = rows_of(GLOSSARY.read_text())
    assert len(rows) > 30
    assert faults(rows, names_in_code()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda rows: rows * 2, "more than"),
        (lambda rows: rows[::-1], "stands behind"),
        (lambda rows: [*rows[:3], rows[2], *rows[4:]], "twice"),
        (
            lambda rows: [(rows[0][0], rows[0][1], ["no_such_name"]), *rows[1:]],
            "has no no_such_name",
        ),
        (lambda rows: [(rows[0][0], rows[0][1], []), *rows[1:]], "names nothing"),
        (lambda rows: [(rows[0][0], "a phrase", rows[0][2]), *rows[1:]], "sentence"),
    ],
)
def test_a_wrong_glossary_is_noticed(change: Callable[[list[Row]], list[Row]], fault: str) -> None:
    rows = change(rows_of(GLOSSARY.read_text()))
    assert any(fault in line for line in faults(rows, names_in_code()))


def test_the_glossary_can_be_found() -> None:
    assert "(docs/reference/glossary.md)" in (ROOT / "README.md").read_text()
    assert re.search(r"\breference/glossary\.md\b", (ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_keep_to_the_words(page: Path) -> None:
    assert banned_in(page.read_text()) == []


def test_sources_call_magiattention_by_its_name() -> None:
    other_names = re.compile(
        "|".join(p for p, name in BANNED.items() if name == "MagiAttention"), re.I
    )
    sources = [path for path in (ROOT / "megatron_magi").rglob("*") if path.suffix in SOURCES]
    assert len(sources) > 200
    assert not [path for path in sources if other_names.search(path.read_text())]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the field's published names", 1),
        ("tuned as in the reference\nsystem", 1),
        ("our flex kernel", 1),
        ("a second mask on the same dispatch", 1),
        ("the kernel `flex`, and the field's value", 0),
        ("<!-- record kernel -->\n| flex |\n<!-- end -->", 0),
        ("```text\nflex\n```", 0),
    ],
)
def test_a_banned_phrase_is_noticed(text: str, count: int) -> None:
    assert len(banned_in(text)) == count
