"""`megatron-magi check` and the job itself agree on generated command lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from tests.launcher.layouts import HERE, SMALL_SCRIPT
from tests.launcher.variants import variant
from tests.megatron_worker import run_jobs_of

FEW = range(10)
ALL = range(10, 200)


@pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the script is written for megatron.training of the 0.19 wheel",
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numbers", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=len)
def test_check_says_what_the_job_does(numbers: range, tmp_path: Path) -> None:
    assert differences(numbers, str(SMALL_SCRIPT), tmp_path) == []


def differences(
    numbers: range, script: str, folder: Path, first: Iterable[Path] = ()
) -> list[dict[str, Any]]:
    """The variants that `check` accepts and the job ends with, or the other way around."""
    variants = {str(number): variant(number) for number in numbers}
    check = {"script": script, "variants": list(variants.values())}
    jobs = [{"name": "check", "function": "verdicts", "kwargs": check, "world": 1}]
    for name, each in variants.items():
        kwargs = {"script": script, "flags": each["flags"]}
        jobs.append({"name": name, "function": "start", "kwargs": kwargs, "world": each["world"]})
    results = run_jobs_of(HERE / "variant_jobs.py", jobs, folder, 1100, first)
    (verdicts,) = results["check"]["values"]
    outcomes = zip(verdicts, variants.items(), strict=True)
    found = [_outcome(name, each, lines, results[name]) for lines, (name, each) in outcomes]
    assert any(each["accepted"] for each in found) and any(each["check"] for each in found)
    return [each for each in found if each["accepted"] != each["trained"]]


def _outcome(
    name: str, given: dict[str, Any], lines: list[str], result: dict[str, Any]
) -> dict[str, Any]:
    trained = "error" not in result and all(result["values"])
    return {
        "variant": name,
        **given,
        "accepted": not lines,
        "trained": trained,
        "check": lines,
        "error": result.get("error", "")[-1500:],
    }
