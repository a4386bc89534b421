"""Our flags become a MagiConfig; everything else reaches Megatron as it was written."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.launcher.flags import (
    CONFIG_FLAGS,
    COST_FLAGS,
    LauncherOptions,
    flag_parser,
    take_flags,
)
from tests.knobs import magi_config

SWITCH = ["--attention-backend", "magi"]
OF_MEGATRON = ["--num-layers", "2", "--bf16", "--spec", "a.module", "a_name"]
GIVEN = {
    "chunk_size": (["--magi-chunk-size", "64"], 64),
    "max_imbalance": (["--magi-max-imbalance", "1.25"], 1.25),
    "forward_mode": (["--magi-forward-mode", "staged"], "staged"),
    "overlap_degree": (["--magi-overlap-degree", "3"], 3),
    "kernel_backend": (["--magi-kernel", "reference"], "reference"),
    "transport": (["--magi-transport", "all_to_all"], "all_to_all"),
    "deterministic": (["--magi-deterministic"], True),
    "dkv_reduce_in_fp32": (["--magi-dkv-in-input-dtype"], False),
    "keep_received_keys": (["--magi-keep-received-keys"], True),
    "agreement_timeout_s": (["--magi-timeout-s", "12.5"], 12.5),
    "ranks_per_node": (["--magi-ranks-per-node", "4"], 4),
}
"""Of every field that has a flag, the flag and the field's value."""


def test_every_flag_is_tried_here() -> None:
    assert list(GIVEN) == [*CONFIG_FLAGS, *COST_FLAGS]
    assert set(CONFIG_FLAGS) <= {field.name for field in fields(MagiConfig)}
    assert set(COST_FLAGS) <= {field.name for field in fields(CostTable)}
    flags = {action.option_strings[0] for action in flag_parser()._actions}
    tried = {words[0] for words, _ in GIVEN.values()}
    assert flags == tried | {"--attention-backend", "--magi-mask", "--magi-balance-step"}


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_sets_its_field_alone(name: str) -> None:
    words, value = GIVEN[name]
    assert magi_config(**{name: value}) != MagiConfig()
    options, rest = take_flags([*OF_MEGATRON, *words, *SWITCH])
    assert options == LauncherOptions(magi_config(**{name: value}))
    assert rest == OF_MEGATRON


def test_all_flags_together() -> None:
    words = [word for flag, _ in GIVEN.values() for word in flag]
    options, rest = take_flags([*words[:6], *OF_MEGATRON, *SWITCH, *words[6:]])
    assert options == LauncherOptions(
        magi_config(**{name: value for name, (_, value) in GIVEN.items()})
    )
    assert rest == OF_MEGATRON


def test_steps_are_balanced_by_a_flag_of_the_launcher() -> None:
    options, rest = take_flags([*SWITCH, "--magi-balance-step", *OF_MEGATRON])
    assert options == LauncherOptions(MagiConfig(), balance_step=True) and rest == OF_MEGATRON


def test_without_flags_the_config_is_the_default() -> None:
    assert take_flags(SWITCH) == (LauncherOptions(MagiConfig()), [])
    assert take_flags(["--attention-backend=magi"]) == (LauncherOptions(MagiConfig()), [])


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused", "local", "auto"])
def test_backends_of_megatron_are_passed_through(backend: str) -> None:
    for words in (["--attention-backend", backend], [f"--attention-backend={backend}"]):
        given = ["--bf16", *words, *OF_MEGATRON]
        assert take_flags(given) == (None, given)


@pytest.mark.parametrize("switch", [SWITCH, ["--attention-backend=magi"]])
def test_a_backend_behind_ours_switches_it_off(switch: list[str]) -> None:
    """As where a job's script has ours, and its caller passes another one."""
    options, rest = take_flags([*switch, *OF_MEGATRON, "--attention-backend", "auto"])
    assert options is None and rest == [*OF_MEGATRON, "--attention-backend", "auto"]
    options, rest = take_flags(["--attention-backend", "auto", *OF_MEGATRON, *switch])
    assert options == LauncherOptions(MagiConfig()) and rest == OF_MEGATRON


def test_without_a_backend_nothing_is_touched() -> None:
    assert take_flags(OF_MEGATRON) == (None, OF_MEGATRON)
    assert take_flags([]) == (None, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attention-backend", "magic"], "invalid choice: 'magic' (choose from "),
        ([*SWITCH, "--magi-kernel", "triton"], "argument --magi-kernel: invalid choice: 'triton'"),
        ([*SWITCH, "--magi-forward-mode", "once"], "argument --magi-forward-mode: invalid choice"),
        ([*SWITCH, "--magi-chunk-size", "big"], "argument --magi-chunk-size: invalid int value"),
        ([*SWITCH, "--magi-timeout-s", "x"], "argument --magi-timeout-s: invalid float value"),
        ([*SWITCH, "--magi-chunk-size"], "argument --magi-chunk-size: expected one argument"),
        (
            [*SWITCH, "--magi-max-imbalance", "0.5"],
            "max_imbalance must be >= 1.0 or None, got 0.5; leave",
        ),
        (
            [*SWITCH, "--magi-mask", "no_such_module:mask"],
            "package.module:function or FILE.py:function, got",
        ),
        ([*SWITCH, "--magi-mask", "sys:no_such"], "module 'sys' has no attribute 'no_such')"),
        ([*SWITCH, "--magi-mask", "sys"], "FILE.py:function, got 'sys'"),
        ([*SWITCH, "--magi-mask", "os:getcwd"], "must name a function of one argument, the MaskR"),
        ([*SWITCH, "--magi-mask", "sys:path"], "--magi-mask must name a function, got 'sys:path'"),
    ],
)
def test_what_does_not_parse_ends_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        take_flags([*OF_MEGATRON, *words])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("megatron_magi: error: ") and said in last


@pytest.mark.parametrize(
    ("flag", "choices"),
    [
        ("--attention-backend", "magi flash fused unfused local auto"),
        ("--magi-kernel", "auto cuda fa4 flex reference"),
        ("--magi-forward-mode", "at_once local_first staged"),
    ],
)
def test_the_error_names_the_choices(
    flag: str, choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        take_flags([*SWITCH, flag, "misspelt"])
    last = capsys.readouterr().err.splitlines()[-1]
    offered = last.partition("choose from ")[2].rstrip(")").replace("'", "").split(", ")
    assert offered == choices.split()


@pytest.mark.parametrize("backend", [[], ["--attention-backend", "flash"]])
@pytest.mark.parametrize("name", [*GIVEN, "mask"])
def test_our_flags_require_the_switch(
    name: str, backend: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words, _ = GIVEN.get(name, (["--magi-mask", "sys:exit"], None))
    with pytest.raises(SystemExit) as end:
        take_flags([*backend, *words])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"megatron_magi: error: --attention-backend magi is required with {words[0]}"


@pytest.mark.parametrize("backend", [[], SWITCH])
@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--magi-chunksize", "64"], "--magi-chunk-size"),
        (["--magi-chunk", "64"], "--magi-chunk-size"),
        (["--magi-kernal=cuda"], "--magi-kernel"),
        (["--magi-max-inbalance", "1.2"], "--magi-max-imbalance"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest(
    backend: list[str], words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that ignores unknown flags would otherwise train with the default."""
    with pytest.raises(SystemExit) as end:
        take_flags([*backend, *OF_MEGATRON, *words])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    got = words[0].partition("=")[0]
    assert last == (
        f"megatron_magi: error: a flag that begins with --magi- must be one of magi's, got {got}; "
        f"the nearest is {nearest}"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def prefix(:", "(SyntaxError: "),
        ("x = 1 / 0", "(ZeroDivisionError: division by zero)"),
        ("import no_such", "(ModuleNotFoundError: No module named 'no_such')"),
    ],
)
def test_a_mask_module_that_fails_is_one_line(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_masks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as end:
        take_flags([*SWITCH, "--magi-mask", "broken_masks:prefix"])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "FILE.py:function, got 'broken_masks:prefix'" in last and said in last


def test_a_mask_function_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_masks.py").write_text("def prefix(request):\n    return request\n")
    monkeypatch.syspath_prepend(tmp_path)
    options, rest = take_flags([*SWITCH, "--magi-mask", "some_masks:prefix"])
    assert options is not None and rest == []
    assert options.mask_name == "some_masks:prefix"
    assert options.mask_function() is sys.modules["some_masks"].prefix
    assert LauncherOptions(MagiConfig()).mask_function() is None
