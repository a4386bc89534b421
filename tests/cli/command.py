"""The command line called in process."""

import json
from typing import Any

import pytest

from megatron_magi.cli import main

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def plan_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)
