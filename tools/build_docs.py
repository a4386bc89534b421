"""Builds the generated docs: docs/api.md from docstrings, tables from the code, docs/images.

python -m tools.build_docs            # write all; needs megatron-core and matplotlib
python -m tools.build_docs --check    # exit code 1 if api.md or a table of the launcher differs
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_magi
from megatron_magi import magi_attention as api
from megatron_magi import masks
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from tools.docs_launcher import page_with_tables
from tools.docs_text import attribute_docs, one_line

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
LAUNCHER_PAGE = ROOT / "docs" / "megatron_lm.md"
IMAGES = ROOT / "docs" / "images"
SECTIONS = ("Args", "Returns", "Raises", "Cost", "Source")

HEAD = """# API reference

Made from the docstrings by `tools/build_docs.py`; do not edit. Guides: [masks](masks.md),
[planner](planner.md), [Megatron-LM](megatron_lm.md), [Megatron-Core](megatron.md),
[from MagiAttention](migrating.md).

- [`megatron_magi`](#megatron_magi): the engine
- [`megatron_magi.masks`](#megatron_magimasks): mask builders
- [`megatron_magi.magi_attention`](#megatron_magimagi_attention): MagiAttention's published names
- [`megatron_magi.adapter`](#megatron_magiadapter): for your own loop on Megatron-Core
- [`megatron_magi.launcher`](#megatron_magilauncher): for Megatron's pretrain scripts
- [`megatron_magi.huggingface`](#megatron_magihuggingface): for models of HuggingFace Transformers
"""

FRAMEWORK_NAMES = {
    "megatron_magi.adapter": {
        "layer_spec": (
            "with_magi_attention",
            "llama_layer_spec",
            "llama_mtp_spec",
            "with_own_norms",
            "MagiSpecProvider",
        ),
        "plugin": ("attach", "assert_active"),
        "packed": (
            "make_packed_seq_params",
            "from_packed_seq_params",
            "pipeline_seq_length",
            "MagiPackedSeqParams",
        ),
        "batch": ("Batch", "dispatch_batch", "LocalBatch"),
        "carried_plan": ("carry_plan", "carried_plan"),
        "pipeline_agreement": ("finish_pipeline_agreement",),
        "loss": ("per_token_loss",),
        "rope": ("MagiRotaryEmbedding",),
        "mla": ("prepare_mla_layers",),
        "mtp": ("install_mtp", "next_tokens"),
        "init": ("init_by_name",),
        "cpu": ("install_cpu_runtime",),
    },
    "megatron_magi.launcher": {
        "install": ("install",),
        "documents": ("MaskRequest",),
        "flags": ("Options",),
    },
    "megatron_magi.run": {"": ("main",)},
    "megatron_magi.huggingface": {
        "register": ("register",),
        "cp_batch": ("dispatch_batch", "Packing", "DispatchedBatch"),
        "documents": ("find_documents", "Documents"),
    },
}
"""What a user of a framework calls, by package and module; the rest of these modules is ours."""


def main() -> int:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--no-pictures", action="store_true", help="text only")
    options = parser.parse_args()
    texts = {PAGE: api_page(), LAUNCHER_PAGE: page_with_tables(LAUNCHER_PAGE)}
    if options.check:
        stale = [page.name for page, text in texts.items() if page.read_text() != text]
        for name in stale:
            print(f"docs/{name} differs from the code; run python -m tools.build_docs")
        return 1 if stale else 0
    for page, text in texts.items():
        page.write_text(text)
        print(f"wrote {page.relative_to(ROOT)}")
    from tools.docs_tables import update_page

    for name in ("tuning.md", "cli.md"):
        update_page(ROOT / "docs" / name)
        print(f"wrote the tables and screens of docs/{name}")
    if not options.no_pictures:
        from tools.docs_figures import draw_all

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
    for package, modules in FRAMEWORK_NAMES.items():
        parts.append(f"## {package}\n\n{_intro(importlib.import_module(package))}")
        for name, entries in modules.items():
            module = importlib.import_module(f"{package}.{name}".rstrip("."))
            if name:
                parts.append(f"**`{module.__name__}`**: {one_line(module.__doc__)}\n")
            parts += [_entry(entry, getattr(module, entry)) for entry in entries]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _intro(module: ModuleType) -> str:
    return _prose(inspect.getdoc(module) or "")


def _entry(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        return _class(name, thing)
    if callable(thing) and hasattr(thing, "__name__"):
        return f"### {name}\n\n{_signature(name, thing)}\n{_prose(inspect.getdoc(thing) or '')}"
    return ""


class _Written(str):
    """An annotation as the source has it, which a signature would put in quotes."""

    __repr__ = str.__str__


def _call(function: Any) -> inspect.Signature:
    """The signature, with annotations as they are written and string defaults in quotes."""
    signature = inspect.signature(inspect.unwrap(function))
    parameters = [
        p.replace(annotation=_written(p.annotation)) for p in signature.parameters.values()
    ]
    return signature.replace(
        parameters=parameters, return_annotation=_written(signature.return_annotation)
    )


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def _signature(name: str, function: Any) -> str:
    """The call as code, one argument a line where it is long."""
    signature = _call(function)
    line = f"{name}{signature}"
    if len(line) > 96:
        parts = str(signature)[1:].rpartition(") -> ")
        arguments = _split_arguments(parts[0] if parts[1] else str(signature)[1:-1])
        body = "".join(f"    {a},\n" for a in arguments)
        line = f"{name}(\n{body})" + (f" -> {parts[2]}" if parts[1] else "")
    return f"```python\n{line}\n```\n"


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
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("megatron_magi")]
    for member, value in [item for base in (cls, *bases) for item in vars(base).items()]:
        if member.startswith("_"):
            continue
        target = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        doc = inspect.getdoc(target)
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            parts.append(f"- `.{member}`: {one_line(doc)}" if doc else f"- `.{member}`")
        elif inspect.isfunction(target):
            arguments = re.sub(r"^\((self|cls)(, )?", "(", str(_call(target)))
            call = f"- `.{member}{arguments}`"
            parts.append(f"{call}: {one_line(doc)}" if doc else call)
    return "\n".join(parts)


def _fields(cls: type) -> Iterator[str]:
    """A line per field or member, with the string below it in the source."""
    notes = attribute_docs(cls)
    if issubclass(cls, enum.Enum):
        for member in cls:
            yield f"- `{member.name} = {member.value!r}`: {notes.get(member.name, '')}".rstrip(": ")
        return
    for f in fields(cls):
        if not f.name.startswith("_") and f.name in cls.__annotations__:
            kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
            note = notes.get(f.name)
            yield f"- `{f.name}: {kind}`" + (f": {note}" if note else "")


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
    raise SystemExit(guarded(main))
