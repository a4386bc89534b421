"""The command line in process: help, exit codes, suggestions."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megatron_magi.cli import COMMANDS, main
from tests.cli.command import Capture, run


def test_help_has_examples_for_every_command(capsys: Capture) -> None:
    code, out, _ = run(capsys)
    assert code == 2 and all(name in out for name in COMMANDS) and "examples:" in out
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0 and f"  megatron-magi {name} " in out, name


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["plna"], "error: COMMAND cannot be 'plna'; did you mean plan?"),
        (["zzz"], "choose from doctor, check, plan, viz, data, compare"),
        (["plan", "--chunksize", "4"], "has no option --chunksize; did you mean --chunk-size?"),
        (["doctor", "--jsn"], "megatron-magi doctor has no option --jsn; did you mean --json?"),
        (["doctor", "now"], "megatron-magi doctor takes no further argument, got 'now'"),
        (
            ["viz", "--lengths", "8", "--only", "mosk"],
            "--only cannot be 'mosk'; did you mean mask?",
        ),
        (
            ["plan", "--cp", "two"],
            "argument --cp: invalid int value: 'two'; see megatron-magi plan",
        ),
        (["plan", "--cp", "2"], "a mask is needed, got none; pass --lengths"),
        (["plan", "--lengths", "8"], "ranks is needed, at least 1, got none; pass --cp"),
        (["plan", "--lengths", "8x", "--cp", "2"], "numbers must look like 4096,8192x3, got '8x'"),
        (["plan", "--lengths", "8", "--cp", "2", "a=1"], "takes no further argument, got 'a=1'"),
        (["plan", "--lengths", "8", "--cp", "2", "--heads", "8,2"], "three numbers Q,KV,DIM"),
        (["plan", "--lengths", "8", "--cp", "2", "--heads", "8,2,4,4,4"], "or four with the head"),
        (["plan", "--lengths", "8", "--cp", "0"], "at least 1, got 0; pass --cp N"),
        (["plan", "--lengths", "8", "--cp", "2", "--chunk-size", "8"], "chunk_size must leave"),
        (["plan", "--cu-seqlens", "0,9,4", "--cp", "2"], "that start at 0 and never decrease"),
        (["plan", "--lengths", "8", "--global-tokens", "2", "--cp", "2"], "needs --window"),
        (["plan", "--data", "nowhere", "--cp", "2"], "--data needs --seq-length"),
        (["compare", "one"], "two runs or more are needed, the baseline first, got only one"),
        (["compare", "one", "two"], "must have a steps.csv or TensorBoard events, got none in one"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    capsys: Capture, arguments: list[str], text: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--version", "--help", "-h"])
def test_version_and_help_import_no_torch(option: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megatron_magi", option]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "megatron_magi.cli.parser" in imported, done.stderr
    assert not imported & {"torch", "numpy", "megatron.core"}
    assert "0.1.0" in done.stdout if option == "--version" else "COMMAND --help" in done.stdout


def test_help_has_a_line_about_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--help")
    told = capsys.readouterr().out
    assert ended.value.code == 0
    for name in COMMANDS:
        summary = str(import_module(f"megatron_magi.cli.{name}").__doc__).split("\n")[0]
        assert " ".join(f"{name} {summary}".split()) in " ".join(told.split())


def test_public_names_are_found_and_no_other_command_is_imported() -> None:
    """`check` looks for the Megatron of the script's folder, so none may be imported before."""
    code = (
        "import sys; sys.argv = ['megatron-magi']; import megatron_magi as magi\n"
        "assert 'torch' not in sys.modules\n"
        "from megatron_magi import masks, HeadShape, plan\n"
        "assert masks.causal and HeadShape is magi.HeadShape and 'torch' in sys.modules\n"
        "assert all(hasattr(magi, name) for name in magi.__all__)\n"
        "assert not hasattr(magi, 'nothing')\n"
        "from megatron_magi.cli import main; main(['check', 'x'])\n"
        "sys.exit('megatron_magi.adapter' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0 and "a pretrain script" in run.stderr, run.stderr
