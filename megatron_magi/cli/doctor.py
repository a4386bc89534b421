"""What is here, which kernel, transport and layers will run and why, and what to do about the rest.

Exit code 0: attention runs here, and everything named with --require is there. 1: not.

examples:
  megatron-magi doctor
  megatron-magi doctor --require megatron cuda     a gate for a training image
  megatron-magi doctor --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from megatron_magi.cli.choices import kernel_choice, layer_choice, transport_choice
from megatron_magi.cli.parser import add_output_options
from megatron_magi.cli.smoke_test import smoke_test
from megatron_magi.cli.system_checks import Check, all_checks

REQUIRABLE = ("megatron", "cuda", "gpu")
MARKS = {"ok": "ok", "absent": "--", "problem": "!!"}


@dataclass(frozen=True)
class Verdict:
    """Whether training can start here."""

    ok: bool
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require", nargs="+", choices=REQUIRABLE, default=[],
        help="fail unless it is there: megatron (a supported megatron-core), gpu (a fused kernel), "
        "cuda (the Hopper kernel, built or buildable)",
    )  # fmt: skip
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check, print, 0 or 1."""
    checks = all_checks()
    kernel, kernel_why = kernel_choice(checks)
    transport, transport_why = transport_choice()
    layers, layers_why = layer_choice(checks)
    tried = smoke_test()
    verdict = judge([*checks, tried], kernel, options.require)
    if options.json:
        print(json.dumps({
            "ok": verdict.ok, "verdict": verdict.text,
            "kernel": {"name": kernel, "why": kernel_why},
            "transport": {"name": transport, "why": transport_why},
            "layers": {"name": layers, "why": layers_why},
            "checks": [asdict(c) for c in [*checks, tried]],
        }, indent=1))  # fmt: skip
    elif options.quiet:
        print("\n".join([*_lines(c for c in checks if c.status == "problem"), verdict.text]))
    else:
        print("\n".join(_lines([*checks, tried])))
        print(f"\nkernel     {kernel}: {kernel_why}")
        print(f"transport  {transport}: {transport_why}")
        print(f"layers     {layers}: {layers_why}")
        print(f"\n{verdict.text}")
    return 0 if verdict.ok else 1


def judge(checks: list[Check], kernel: str, required: list[str]) -> Verdict:
    """The verdict: problems first, then what is required and missing."""
    found = {c.name: c for c in checks}
    failed = [f"{c.name}: {c.found}; {c.advice}" for c in checks if c.status == "problem"]
    met = {
        "megatron": found["megatron-core"].status == "ok",
        "gpu": kernel in ("cuda", "flex"),
        "cuda": kernel == "cuda" and found["CUDA library"].status == "ok",
    }
    where = {"megatron": "megatron-core", "gpu": "GPU", "cuda": "CUDA library"}
    for name in required:
        if name == "cuda" and kernel != "cuda":
            failed.append(f"--require cuda: attention runs on {kernel}; it needs a Hopper GPU")
        elif not met[name]:
            check = found[where[name]]
            failed.append(f"--require {name}: {check.found}; {check.advice or 'see above'}")
    if failed:
        return Verdict(False, "not ready: " + "\n           ".join(failed))
    if not met["megatron"]:
        return Verdict(True, "ready for attention; training needs megatron-core (see above)")
    return Verdict(True, f"ready: trains here with the {kernel} kernel")


def _lines(checks: object) -> list[str]:
    lines = []
    for check in checks:  # type: ignore[attr-defined]
        lines.append(f"{MARKS[check.status]}  {check.name:<20} {check.found}")
        if check.advice:
            lines.append(f"{'':<25}-> {check.advice}")
    return lines
