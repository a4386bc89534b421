"""Kernel chains (csrc/attention/device/kernel_chain.h) on a runtime without a GPU, which is in
``kernel_chain/``: which graphs are made, kept and destroyed, and what threads wait for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernel_chain"
ROOT = HERE.parents[3]
CHAIN = ROOT / "megatron_magi" / "csrc" / "attention" / "device" / "kernel_chain.cpp"
NAMES = [
    "a_graph_lives_until_it_is_launched",
    "a_kernel_that_fails_is_an_error",
    "a_launch_that_waits_holds_up_no_other_stream",
    "captures_get_the_kernels",
    "failing_graphs_are_left_out",
    "one_graph_for_each_stream_and_choice",
    "those_that_were_launched_last_are_kept",
    "threads_have_parameters_of_their_own",
    "threads_without_a_context_launch_kernels",
]
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernel_chain") / "scenarios"
    sources = [CHAIN, HERE / "runtime.cpp", HERE / "scenarios.cpp"]
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-pthread", f"-I{HERE}"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, *sources, "-o", made], check=True, timeout=120)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_scenario(name: str, program: Path) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_every_scenario_is_run(program: Path) -> None:
    listed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=20)
    assert listed.stdout.split() == NAMES
