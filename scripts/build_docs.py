#!/usr/bin/env python3
"""Builds the generated docs: docs/api.md from docstrings, docs/images from the picture code.

python scripts/build_docs.py            # write both
python scripts/build_docs.py --check    # exit code 1 if docs/api.md is not what the code says
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_magi
from megatron_magi import api, masks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
IMAGES = ROOT / "docs" / "images"
SECTIONS = ("Args", "Returns", "Raises", "Cost", "Source")

HEAD = """# API reference

Made from the docstrings by `scripts/build_docs.py`; do not edit. Guides: [masks](masks.md),
[planner](planner.md), [Megatron](megatron.md), [from MagiAttention](migrating.md).

- [`megatron_magi`](#megatron_magi): the engine
- [`megatron_magi.masks`](#megatron_magimasks): mask builders
- [`megatron_magi.api`](#megatron_magiapi): the field's published names
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--no-pictures", action="store_true", help="text only")
    options = parser.parse_args()
    page = api_page()
    if options.check:
        if PAGE.read_text() == page:
            return 0
        print("docs/api.md differs from the docstrings; run python scripts/build_docs.py")
        return 1
    PAGE.write_text(page)
    print(f"wrote {PAGE.relative_to(ROOT)}")
    from docs_tables import update_page

    for name in ("tuning.md", "cli.md"):
        update_page(ROOT / "docs" / name)
        print(f"wrote the tables and screens of docs/{name}")
    if not options.no_pictures:
        from docs_figures import draw_all

        for path in draw_all(IMAGES):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def api_page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module in (megatron_magi, masks, api):
        parts.append(f"## {module.__name__}\n\n{_intro(module)}")
        for name in sorted(module.__all__, key=str.lower):
            parts.append(_entry(name, getattr(module, name)))
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _intro(module: ModuleType) -> str:
    return _prose(inspect.getdoc(module) or "")


def _entry(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        return _class(name, thing)
    if callable(thing) and hasattr(thing, "__name__"):
        return f"### {name}\n\n{_signature(name, thing)}\n{_prose(inspect.getdoc(thing) or '')}"
    return ""


def _signature(name: str, function: Any) -> str:
    """The call as code, one argument a line where it is long."""
    signature = inspect.signature(inspect.unwrap(function))
    line = f"{name}{signature}"
    if len(line) > 96:
        parts = str(signature)[1:].rpartition(") -> ")
        arguments = _split_arguments(parts[0] if parts[1] else str(signature)[1:-1])
        body = "".join(f"    {a},\n" for a in arguments)
        line = f"{name}(\n{body})" + (f" -> {parts[2]}" if parts[1] else "")
    return f"```python\n{line.replace(chr(39), '')}\n```\n"


def _split_arguments(text: str) -> list[str]:
    """At commas outside brackets."""
    pieces, depth, piece = [], 0, ""
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append(piece.strip())
            piece = ""
        else:
            piece += letter
    return [*pieces, piece.strip()]


def _class(name: str, cls: type) -> str:
    parts = [f"### {name}\n", _prose(inspect.getdoc(cls) or "")]
    if is_dataclass(cls) or issubclass(cls, enum.Enum):
        parts += list(_fields(cls))
    for member, value in vars(cls).items():
        if member.startswith("_"):
            continue
        target = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        doc = inspect.getdoc(target)
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            parts.append(f"- `.{member}`: {_one_line(doc)}" if doc else f"- `.{member}`")
        elif inspect.isfunction(target):
            arguments = re.sub(r"^\((self|cls)(, )?", "(", str(inspect.signature(target)))
            call = f"- `.{member}{arguments}`".replace("'", "")
            parts.append(f"{call}: {_one_line(doc)}" if doc else call)
    return "\n".join(parts)


def _fields(cls: type) -> Iterator[str]:
    """A line per field or member, with the string below it in the source."""
    notes = _attribute_docs(cls)
    if issubclass(cls, enum.Enum):
        for member in cls:
            yield f"- `{member.name} = {member.value!r}`: {notes.get(member.name, '')}".rstrip(": ")
        return
    for f in fields(cls):
        if not f.name.startswith("_"):
            kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
            note = notes.get(f.name)
            yield f"- `{f.name}: {kind}`" + (f": {note}" if note else "")


def _attribute_docs(cls: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    notes: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):  # type: ignore[attr-defined]
        target = before.target if isinstance(before, ast.AnnAssign) else None
        if isinstance(before, ast.Assign):
            target = before.targets[0]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text and isinstance(after.value.value, str):
            notes[target.id] = _one_line(inspect.cleandoc(after.value.value))
    return notes


def _one_line(doc: str | None) -> str:
    return " ".join((doc or "").partition("\n\n")[0].replace("``", "`").split())


def _prose(doc: str) -> str:
    """A docstring as Markdown: paragraphs, code by indentation, sections as lists."""
    lines: list[str] = []
    for block in re.split(r"\n\n", doc.replace("``", "`")):
        title, _, body = block.partition("\n")
        section = title.rstrip(":").split(":")[0]
        if section in SECTIONS and title.startswith(f"{section}:"):
            lines.append(_section(section, title[len(section) + 1 :].strip(), body))
        elif block.startswith("    "):
            lines.append(f"```python\n{textwrap.dedent(block)}\n```")
        else:
            lines.append(block)
    return "\n\n".join(line for line in lines if line) + "\n"


def _section(name: str, same_line: str, body: str) -> str:
    text = textwrap.dedent(body)
    if name not in ("Args", "Raises"):
        rest = " ".join(f"{same_line} {text}".split())
        return f"{name}: {rest}"
    items: list[str] = []
    for line in text.splitlines():
        if re.match(r"\S", line) and ":" in line:
            key, _, value = line.partition(":")
            items.append(f"- `{key}`: {value.strip()}")
        elif items:
            items[-1] += f" {line.strip()}"
    return f"{name}:\n\n" + "\n".join(items)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    raise SystemExit(main())
