"""Patches add two lines to each pretrain script, go away without a trace, and do what they are for.

With `--megatron-checkout PATH` the scripts of that checkout are patched, in a copy, and trained.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.train.pretrain_cases import words
from megatron_magi.launcher.hook_points import FIRST, LAST
from tests.launcher.test_other_layers import HYBRID
from tests.launcher.tiny_flags import TINY

ROOT = Path(__file__).parents[1]
APPLY = ROOT / "scripts" / "apply_patches.sh"
PATCHES = sorted((ROOT / "patches").glob("*/*.patch"))
ADDED = ["import megatron_magi.launcher", "megatron_magi.launcher.install()"]
"""All that a patch may add to a script."""
HEADER = ("Upstream", "Seam", "Place", "Unnecessary once", "Test", "May go")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+),2 @@")
TAGS = {18: "core_v0.18.2", 19: "core_v0.19.0", 20: "main-d98e8a64"}
"""Of each minor of Megatron-LM, the version that its patch is made for."""
FORMAT = ("diff --git a/{0} b/{0}", "--- a/{0}", "+++ b/{0}")
MAGI_CP2 = {"attention-backend": "magi", "context-parallel-size": 2}
SCRIPTS = {"pretrain_gpt.py": {}, "pretrain_hybrid.py": HYBRID}


def patch_of(minor: int) -> Path:
    return ROOT / "patches" / f"megatron-lm-{TAGS[minor]}" / "0001-magi-attention-backend.patch"


def places(patch: Path) -> dict[str, int]:
    """By script, the line behind which the two lines go."""
    text = patch.read_text()
    names = re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)
    return dict(zip(names, map(int, re.findall(r"^@@ -(\d+),0", text, re.MULTILINE)), strict=True))


def apply(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([APPLY, checkout, *flags], capture_output=True, text=True, timeout=60)


def assert_one_line(result: subprocess.CompletedProcess[str], text: str) -> None:
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("apply_patches.sh: ") and text in result.stderr, result.stderr


def made_up_checkout(folder: Path, minor: int) -> Path:
    """Scripts that have nothing of Megatron's but the place where a patch goes."""
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n")
    for script, line in places(patch_of(minor)).items():
        before = "".join(f"# {i}\n" for i in range(1, line))
        (folder / script).write_text(f"{before}import torch\n\n# behind\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def test_every_minor_of_the_launcher_has_a_patch() -> None:
    assert [(0, minor) for minor in TAGS] == [(0, n) for n in range(FIRST[1], LAST[1] + 1)]
    assert sorted(map(patch_of, TAGS)) == PATCHES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.parent.name)
def test_patches_say_what_they_are_for(patch: Path) -> None:
    header = patch.read_text().split("\n---\n")[0]
    assert re.findall(r"^(\w[\w ]*): ", header, re.MULTILINE) == list(HEADER)
    assert patch.parent.name.rsplit("-", 1)[-1] in header
    file, name = re.findall(r"^Test: (\S+)::(\w+)$", header, re.MULTILINE)[0]
    assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.parent.name)
def test_patches_hold_our_two_lines_and_positions(patch: Path) -> None:
    lines = patch.read_text().split("\n---\n")[1].splitlines()
    assert len(lines) == 6 * len(places(patch)) > 0
    for start, script in zip(range(0, len(lines), 6), places(patch), strict=True):
        *names, hunk, first, second = lines[start : start + 6]
        assert names == [line.format(script) for line in FORMAT]
        match = HUNK.fullmatch(hunk)
        assert match is not None and int(match[2]) == int(match[1]) + 1
        assert [first, second] == [f"+{line}" for line in ADDED]


@pytest.mark.parametrize("minor", TAGS)
def test_scripts_are_patched_and_restored(minor: int, tmp_path: Path) -> None:
    checkout = made_up_checkout(tmp_path, minor)
    stock = contents(checkout)
    assert apply(checkout, "--check").stdout == f"megatron-lm-{TAGS[minor]} applies\n"
    assert contents(checkout) == stock
    assert apply(checkout).stdout == f"applied megatron-lm-{TAGS[minor]}\n"
    added = "".join(f"{line}\n" for line in ADDED)
    for script, text in contents(checkout).items():
        assert text.decode() == stock[script].decode().replace("torch\n", f"torch\n{added}")
    assert apply(checkout, "--revert").stdout == f"reverted megatron-lm-{TAGS[minor]}\n"
    assert contents(checkout) == stock


def test_a_repository_around_the_checkout_changes_nothing(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    checkout = made_up_checkout(tmp_path / "inner", 19)
    assert apply(checkout).returncode == 0
    assert ADDED[1] in (checkout / "pretrain_gpt.py").read_text()


def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path) -> None:
    checkout = made_up_checkout(tmp_path / "checkout", 19)
    assert_one_line(apply(checkout, "--undo"), "usage: scripts/apply_patches.sh CHECKOUT")
    assert_one_line(apply(tmp_path / "none"), "which is no folder; name its root")
    assert_one_line(apply(tmp_path), f"with pretrain_gpt.py is required, got {tmp_path};")
    assert_one_line(apply(checkout, "--revert"), "a patched checkout is required, got one that is")
    apply(checkout)
    for flag in ((), ("--check",)):
        assert_one_line(apply(checkout, *flag), "scripts without the patch are required, got pat")


def test_unknown_versions_are_refused(tmp_path: Path) -> None:
    checkout = made_up_checkout(tmp_path, 19)
    info = checkout / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 21\n")
    assert_one_line(apply(checkout), "Megatron-LM 0.18 to 0.20 is required, got 0.21;")
    info.write_text("")
    assert_one_line(apply(checkout), "got no version;")


def test_scripts_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    checkout = made_up_checkout(tmp_path, 19)
    hybrid = checkout / "pretrain_hybrid.py"
    text = hybrid.read_text()
    hybrid.write_text(f"# one more\n{text}")
    stock = contents(checkout)
    assert_one_line(apply(checkout), "line 23 of pretrain_hybrid.py must be 'import torch', got '#")
    hybrid.write_text(text.replace("# behind", ADDED[0]))
    assert_one_line(apply(checkout), "scripts without our lines are required, got pretrain_hybrid")
    hybrid.unlink()
    assert_one_line(apply(checkout), "pretrain_hybrid.py is required, got none; restore it")
    assert contents(checkout).items() < stock.items()


def linked_checkout(folder: Path, checkout: Path) -> Path:
    """The checkout by links, with pretrain scripts of its own."""
    folder.mkdir()
    for each in checkout.iterdir():
        if each.name not in SCRIPTS:
            (folder / each.name).symlink_to(each)
        else:
            (folder / each.name).write_bytes(each.read_bytes())
    return folder


def train(*command: str | Path, **flags: object) -> str:
    """What two ranks print that are started as a user starts them."""
    started = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", *command),
            *words({**TINY, **flags, **MAGI_CP2}),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert started.returncode == 0, started.stderr[-4000:]
    return started.stdout


def steps(output: str) -> list[tuple[str, ...]]:
    """(loss, imbalance, gradient norm) of every iteration, as printed."""
    pattern = r"lm loss: (\S+) .* magi imbalance: (\S+) .* grad norm: (\S+) "
    return re.findall(pattern, output)


@pytest.mark.megatron_checkout
@pytest.mark.parametrize("script", SCRIPTS)
def test_patched_scripts_train_as_the_launcher_does(
    megatron_checkout: Path, tmp_path: Path, script: str
) -> None:
    checkout = linked_checkout(tmp_path / "checkout", megatron_checkout)
    if not (checkout / script).exists():
        pytest.skip(f"this version has no {script}")
    launched = train("-m", "megatron_magi.run", checkout / script, **SCRIPTS[script])
    assert apply(checkout).returncode == 0
    patched = train(checkout / script, **SCRIPTS[script])
    assert len(steps(patched)) == TINY["train-iters"]
    assert steps(patched) == steps(launched)
    assert "megatron_magi active: " in patched


@pytest.mark.megatron_checkout
def test_scripts_of_the_checkout_are_restored(megatron_checkout: Path, tmp_path: Path) -> None:
    checkout = linked_checkout(tmp_path / "checkout", megatron_checkout)
    stock = contents(checkout)
    assert apply(checkout).returncode == 0
    assert contents(checkout) != stock
    assert apply(checkout, "--revert").returncode == 0
    assert contents(checkout) == stock
