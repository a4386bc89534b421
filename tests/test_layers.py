"""Imports go to lower layers only, comm and kernel do not know each other, no files in a circle.

The same for the programs beside the package: benchmarks by subject, and tools above them.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_magi"
MODULES = sorted([*PACKAGE.rglob("*.py"), PACKAGE / "_solver.pyi"])
BASE = [
    "config",
    "debug",
    "build",
    "requirements",
    "_solver",
    "checks",
    "core.tensor_checks",
    "core.native",
    "core.cuda",
]
MASK_FUNCTIONS = ["launcher.flags", "launcher.documents"]
"""How `--magi-mask` finds and calls its function, which the commands share."""
JUDGED_JOB = ["launcher.preflight", "launcher.job_plans", "launcher.file_samples", "recipe", "run"]
"""What `megatron-magi check` reads, judges and plans a job with, and `plan` reads data with."""
LAYERS = {
    "core.mask": BASE,
    "core.plan": [*BASE, "core.mask"],
    "core.comm": [*BASE, "core.mask", "core.plan"],
    "core.kernel": [*BASE, "core.mask", "core.plan"],
    "core.runtime": [*BASE, "core"],
    "adapter": [*BASE, "core", "PUBLIC"],
    "balance": [],
    "compare": ["checks"],
    "text": ["checks", "adapter.compat"],
    "launcher": [*BASE, "core", "PUBLIC", "adapter", "recipe", "balance"],
    "bridge": [*BASE, "core", "PUBLIC", "adapter", "launcher"],
    "huggingface": [*BASE, "core", "PUBLIC"],
    "run": [*BASE, "launcher", "recipe"],
    "magi_attention": [*BASE, "core"],
    "viz": [*BASE, "core", "compare"],
    "cli": [
        *BASE,
        "core",
        "PUBLIC",
        "adapter",
        "balance",
        "compare",
        "text",
        "viz",
        *MASK_FUNCTIONS,
        *JUDGED_JOB,
    ],
}
"""What each layer may import beside itself; PUBLIC: the names of ``import megatron_magi``."""
ROOT = PACKAGE.parent
SUBJECTS = {
    "lib": (),
    "kernel": ("lib",),
    "planner": ("lib",),
    "distributed": ("lib", "planner"),
    "train": ("lib", "planner", "distributed"),
}
"""Rooms of benchmarks/, and which others each may import."""
WITH_CHECKOUT_PATH = (
    "benchmarks/train/pretrain.py",
    "benchmarks/train/pretrain_named.py",
    "benchmarks/train/titan.py",
    "benchmarks/train/warm_rank.py",
)
"""Programs that put a checkout of Megatron or torchtitan on Python's path, or our examples behind
one that has a package of that name."""
WITH_MEGATRON = ("adapter", "launcher", "bridge", "run", "text")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[str]:
    """Dotted names of all that a file imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides the layer"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def import_graph() -> dict[str, set[str]]:
    """Modules by the modules that they name; a package's name stands for its __init__.py."""
    paths = {module_of(path).removesuffix("__init__").rstrip("."): path for path in MODULES}
    graph = {}
    for module, path in paths.items():
        ours = [n for n in imports(path) if within(n, "megatron_magi")]
        targets = [n.removeprefix("megatron_magi").lstrip(".") for n in ours]
        graph[module] = {t if t in paths else t.rpartition(".")[0] for t in targets}
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of two or more modules that all reach each other."""
    reach = {module: reached(graph, module) for module in graph}
    groups = {frozenset(m for m in reach[n] if n in reach.get(m, ())) | {n} for n in graph}
    return {group for group in groups if len(group) > 1}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def public_names() -> set[str]:
    froms = [n for n in ast.walk(parse(PACKAGE / "public.py")) if isinstance(n, ast.ImportFrom)]
    return {alias.asname or alias.name for node in froms for alias in node.names} | {"__version__"}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_downward(layer: str) -> None:
    files = [p for p in PACKAGE.rglob("*.py") if within(module_of(p), layer)]
    assert files, f"layer {layer} is gone: update LAYERS"
    allowed = [layer, *LAYERS[layer]]
    for path in files:
        for name in imports(path):
            if not within(name, "megatron_magi"):
                continue
            target = name.removeprefix("megatron_magi").lstrip(".")
            is_public = target.split(".")[0] in public_names() | {""}
            ok = any(within(target, a) for a in allowed) or ("PUBLIC" in allowed and is_public)
            assert ok, f"{module_of(path)} must not import {name}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for type checkers alone count as well."""
    found = [sorted(circle) for circle in circles(import_graph())]
    assert not found, "these files import each other in a circle"


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"e"}, "f": {"a", "e"}}
    assert circles(graph) == {frozenset("abc")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()


def test_megatron_is_imported_above_the_core_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if any(within(n, "megatron") for n in imports(path)):
            assert module_of(path).split(".")[0] in WITH_MEGATRON, path


def test_torch_distributed_stays_in_comm_and_runtime() -> None:
    for path in (PACKAGE / "core").rglob("*.py"):
        if any(within(n, "torch.distributed") for n in imports(path)):
            assert module_of(path).split(".")[1] in ("comm", "runtime"), path


def test_the_environment_is_read_by_five_modules_only() -> None:
    """Debugging, the build, the warning about another system's variables, what a job asks of the
    attention that is replaced, and the variables of a recipe."""
    for path in PACKAGE.rglob("*.py"):
        if module_of(path) not in (
            "debug",
            "build",
            "recipe",
            "magi_attention.renamed",
            "launcher.nvte_env",
        ):
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, path


def test_inline_assembly_stands_in_two_headers() -> None:
    """A kernel that calls them by name can be read without knowing PTX."""
    files = [p for p in (PACKAGE / "csrc").rglob("*") if p.is_file()]
    found = {p.name for p in files if re.search(r"\b(__)?asm(__)?\b", p.read_text())}
    assert found == {"ptx.h", "wgmma.h"}


def test_the_package_imports_no_program_of_the_checkout() -> None:
    for path in PACKAGE.rglob("*.py"):
        found = [n for n in imports(path) if n.split(".")[0] in ("benchmarks", "tools", "scripts")]
        assert not found, path


@pytest.mark.parametrize("subject", SUBJECTS)
def test_benchmarks_import_lower_subjects_only(subject: str) -> None:
    allowed = [f"benchmarks.{name}" for name in (subject, *SUBJECTS[subject])]
    files = list((ROOT / "benchmarks" / subject).glob("*.py"))
    assert len(files) > 1, f"subject {subject} is gone: update SUBJECTS"
    for path in files:
        for name in imports(path):
            assert name.split(".")[0] not in ("tools", "scripts", "tests"), path
            ok = not within(name, "benchmarks") or any(within(name, a) for a in allowed)
            assert ok, f"{path.relative_to(ROOT)} must not import {name}"


def test_every_benchmark_is_in_a_subject() -> None:
    assert {path.parent.name for path in (ROOT / "benchmarks").glob("*/*.py")} == set(SUBJECTS)
    assert [p.name for p in (ROOT / "benchmarks").glob("*.py")] == ["__init__.py"]


def test_benchmarks_and_tools_are_imported_by_their_packages() -> None:
    """From the checkout's root, so that no folder has to be put on Python's path."""
    paths = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    found = [p.relative_to(ROOT).as_posix() for p in paths if "sys.path" in p.read_text()]
    assert sorted(found) == sorted(WITH_CHECKOUT_PATH)


def test_programs_that_are_started_by_name_exist() -> None:
    """Usage lines, commands of records, and modules that other processes run."""
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        named = re.findall(r'(?:-m |")((?:benchmarks|tools)(?:\.\w+)+)', path.read_text())
        missing = [n for n in named if not (ROOT / f"{n.replace('.', '/')}.py").exists()]
        assert not missing, path


def test_jobs_in_a_checkout_of_megatron_import_no_package_that_it_has() -> None:
    """Its folders examples, tests and tools are packages and come first on the path."""
    for name in ("launcher_jobs", "variant_jobs", "conversations", "damages", "tiny_flags"):
        path = ROOT / "tests" / "launcher" / f"{name}.py"
        found = [n for n in imports(path) if n.split(".")[0] in ("examples", "tests", "tools")]
        assert not found, path
