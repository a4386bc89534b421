"""Examples in the docs run, and the reference names what there is."""

import ast
import importlib
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_magi
from megatron_magi import huggingface, masks
from megatron_magi import magi_attention as api
from megatron_magi.cli import main
from tests.process_pool import pool
from tools import build_docs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SMALLER = {
    "0, 5000, 5300, 16384": "0, 20, 23, 64",
    "(1024, 0)": "(8, 0)",
    "num_heads_q=32": "num_heads_q=4",
    "num_heads_kv=8": "num_heads_kv=2",
    "head_dim=128": "head_dim=16",
}
"""Numbers of README's example, and those that a test can take."""


@pytest.mark.parametrize(
    "page", ["guides/masks.md", "guides/migrating.md", "guides/megatron_lm.md"]
)
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_functions_on_plain_tensors_of_the_readme() -> None:
    """With smaller numbers, on one rank and on two alike."""
    block = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    for long, short in SMALLER.items():
        assert long in block
        block = block.replace(long, short)
    (alone,) = pool(1).run(run_readme, block)
    for spread in pool(2).run(run_readme, block):
        torch.testing.assert_close(spread, alone)


def run_readme(rank: int, block: str) -> list[torch.Tensor]:
    """[out over the group, out on one device] of the whole sequence."""
    gen = torch.Generator().manual_seed(1)
    rows = {n: torch.randn(64, h, 16, generator=gen) for n, h in zip("qkv", (4, 2, 2), strict=True)}
    names: dict[str, Any] = {"x": torch.arange(64), "cp_group": dist.group.WORLD, **rows}
    before, call, after = re.split(r"^(out, lse = .*\n)", block, maxsplit=1, flags=re.M)
    exec(before, names)
    plan = names["plan"]
    names |= {n: megatron_magi.dispatch(t, plan, dist.group.WORLD) for n, t in rows.items()}
    exec(call, names)
    spread = megatron_magi.undispatch(names["out"], plan, dist.group.WORLD)
    names |= rows
    exec(after, names)
    return [spread, names["out"]]


def example_of(module: ModuleType) -> str:
    """The code in a module's docstring, which the reference shows."""
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    assert "import" in lines[0]
    return textwrap.dedent("\n".join(lines))


def test_examples_of_the_reference() -> None:
    """Ours and MagiAttention's are one computation, on one rank and on two."""
    ours, theirs = example_of(megatron_magi), example_of(api)
    (alone,) = pool(1).run(run_reference, ours)
    for block, world in ((theirs, 1), (ours, 2), (theirs, 2)):
        for spread in pool(world).run(run_reference, block):
            torch.testing.assert_close(spread, alone)


def run_reference(rank: int, block: str) -> torch.Tensor:
    """The example's y, where q, k and v are parts of x, and the model adds nothing to out."""
    x = torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(2))
    names: dict[str, Any] = {"x": x, "cu_seqlens": [0, 20, 64], "cp_group": dist.group.WORLD}
    names |= {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8}
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], []), "example", "exec"), names)
        if "x_local" in names:
            rows = names["x_local"]
            names |= {"q": rows, "k": rows[:, :2], "v": rows[:, 2:]}
        names["y_local"] = names.get("out")
    return names["y"]


def test_the_example_of_transformers_in_the_reference() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.huggingface.tiny_models import VOCAB, config

    tokens = torch.arange(24)[None] % VOCAB
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "config": config("llama")}
    names |= {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(24)[None]}
    exec(example_of(huggingface), names)
    assert names["loss"] > 0


def test_the_screen_of_doctor_has_the_last_lines_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Findings differ between machines; the names of the lines do not."""
    page = (DOCS / "reference/cli.md").read_text()
    screen = page.split("<!-- screen doctor # -5: -->\n")[1].split("\nIt also runs")[0]
    assert main(["doctor"]) == 0
    names = r"^ *(?:(?:ok|--|!!)  ([\w-]+(?: [\w-]+)?)  |(kernel|transport|layers)  |(ready): )"
    shown, printed = (re.findall(names, text, re.M) for text in (screen, capsys.readouterr().out))
    assert len(printed) > 15 and shown == printed[-4:]


@pytest.mark.parametrize("page", ["guides/megatron_core.md", "guides/megatron_lm.md"])
def test_the_start_up_line_on_a_page_is_that_of_its_plan(page: str) -> None:
    pattern = (
        r"megatron_magi active: .* cp (\d+), heads (\d+)/(\d+)x(\d+), chunk (\d+), "
        r"imbalance (\S+) \(causal, (\d+) tokens\)"
    )
    found = re.search(pattern, (DOCS / page).read_text()).groups()
    cp, heads, groups, width, chunk = map(int, found[:5])
    shape = megatron_magi.HeadShape(heads, groups, width)
    plan = megatron_magi.plan(masks.causal(int(found[6])), cp, shape)
    assert (plan.layout.chunk_size, f"{plan.imbalance:.3f}") == (chunk, found[5])


def test_the_rendered_mask_is_the_one_on_the_page() -> None:
    text = masks.render_dense(masks.from_cu_seqlens([0, 3, 8], window_size=(2, 0)))
    page = re.sub(r"^ {4}", "", (DOCS / "guides/masks.md").read_text(), flags=re.M)
    assert text in page


def test_the_reference_names_what_there_is() -> None:
    """The site is built without importing anything, so a stale name would only be absent there."""
    page = (DOCS / "reference/api.md").read_text()
    entries = re.findall(r"^::: (\S+)\n(?:    options: \{members: \[(.*)\]\})?", page, re.M)
    assert {"megatron_magi", "megatron_magi.masks", "megatron_magi.magi_attention"} <= {
        name for name, members in entries if not members
    }
    for module in (megatron_magi, masks):
        named = set(re.findall(r"`(\w+)`", page.split(f"::: {module.__name__}\n")[0]))
        assert set(module.__all__) - {"masks"} <= named, "the page names what help() shows"
    for name, members in entries:
        module = importlib.import_module(name)
        assert all(hasattr(module, member) for member in members.split(", ") if member), name


def test_migrating_names_every_argument_without_effect() -> None:
    page = (DOCS / "guides/migrating.md").read_text()
    for name in api.TUNING_ARGUMENTS:
        assert f"`{name}`" in page


def test_generated_pages_are_what_the_code_says() -> None:
    assert build_docs.main(["--check"]) == 0, "run python -m tools.build_docs"


def test_the_mask_function_of_the_docs_keeps_samples_apart() -> None:
    from megatron_magi.launcher.documents import MaskRequest

    page = (DOCS / "guides/megatron_lm.md").read_text()
    names: dict[str, object] = {}
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1], names)
    mask = names["frames"](MaskRequest((0, 50, 98), None))
    assert mask == masks.block_causal([[24, 24, 2], [24, 24]])


def test_every_flag_and_version_of_the_launcher_is_on_its_page() -> None:
    from megatron_magi.launcher import flags, hook_points

    page = (DOCS / "reference/flags.md").read_text()
    for action in flags.flag_parser()._actions:
        assert f"| `{action.option_strings[0]}` |" in page
    page = (DOCS / "guides/megatron_lm.md").read_text()
    for minor in range(hook_points.FIRST[1], hook_points.LAST[1] + 1):
        assert f"\n| 0.{minor}" in page
