"""Examples in the docs run, and the reference has every public name."""

import re
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi import api, masks

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["masks.md", "migrating.md"])
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_the_rendered_mask_is_the_one_on_the_page() -> None:
    text = masks.render_dense(masks.from_cu_seqlens([0, 3, 8], window_size=(2, 0)))
    page = re.sub(r"^ {4}", "", (DOCS / "masks.md").read_text(), flags=re.M)
    assert text in page


@pytest.mark.parametrize("module", [megatron_magi, masks, api], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module: object) -> None:
    page = (DOCS / "api.md").read_text()
    section = page.split(f"\n## {module.__name__}\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^### (\w+)$", section, re.M))
    public = {n for n in module.__all__ if callable(getattr(module, n)) and n[0] != "_"}
    public -= {"GeneralAttnMaskType"}  # a type alias
    assert public <= documented, "run python scripts/build_docs.py"


def test_migrating_names_every_argument_without_effect() -> None:
    page = (DOCS / "migrating.md").read_text()
    for name in api.TUNING_ARGUMENTS:
        assert f"`{name}`" in page
