"""What the generated pages share: sentences out of the source, and tables between marks."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping


def attribute_docs(cls: type) -> dict[str, str]:
    """The string below each field or member in the source of a class, as one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    notes: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):  # type: ignore[attr-defined]
        target = before.target if isinstance(before, ast.AnnAssign) else None
        if isinstance(before, ast.Assign):
            target = before.targets[0]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text and isinstance(after.value.value, str):
            notes[target.id] = one_line(inspect.cleandoc(after.value.value))
    return notes


def one_line(doc: str | None) -> str:
    """The first paragraph."""
    return " ".join((doc or "").partition("\n\n")[0].replace("``", "`").split())


def fill_tables(
    text: str, makers: Mapping[str, Callable[[], Iterable[str]]], mark: str = "table"
) -> str:
    """The text with new lines between ``<!-- MARK NAME -->`` and ``<!-- end -->``."""

    def fill(match: re.Match[str]) -> str:
        return "\n".join((f"<!-- {mark} {match[1]} -->", *makers[match[1]](), "<!-- end -->"))

    return re.sub(rf"<!-- {mark} (.*?) -->\n.*?<!-- end -->", fill, text, flags=re.S)
