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


def fill_tables(text: str, makers: Mapping[str, Callable[[], Iterable[str]]]) -> str:
    """The text with new lines between ``<!-- table NAME -->`` and ``<!-- end -->``."""
    for name, make in makers.items():
        marked = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        if re.search(marked, text, re.S):
            table = "\n".join(make())
            text = re.sub(marked, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S)
    return text
