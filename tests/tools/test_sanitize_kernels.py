"""Without a Hopper GPU the sanitizer script refuses, and says why."""

from pathlib import Path

import pytest
import torch

from megatron_magi.cli.errors import run_cli
from tools import sanitize_kernels
from tools.sanitize_kernels import sanitize


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_nothing_is_called_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda: sanitize_kernels.main([])) == 2
    said = capsys.readouterr()
    assert "a Hopper GPU is needed" in said.err and "clean" not in said.out


@pytest.mark.parametrize("code, verdict", [(0, "clean"), (9, "FINDINGS")])
@pytest.mark.parametrize(
    "tool, wanted",
    [("racecheck", "--racecheck-report analysis"), ("initcheck", "--check-api-memory-access no")],
)
def test_output_is_shown_and_the_exit_code_decides(
    code: int, verdict: str, tool: str, wanted: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\necho "args $@"\necho\necho "last word" >&2\nexit {code}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sanitize(tool, "64-64") == (code == 0)
    shown = capsys.readouterr().out.splitlines()
    assert f"args --tool {tool} {wanted}" in shown[0]
    assert shown[0].endswith("--run --widths 64-64")
    assert len(shown) == 3 and shown[2] == f"{tool}: {verdict}: last word"
