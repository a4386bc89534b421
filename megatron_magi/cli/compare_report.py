"""The report of a comparison: a table, verdicts, facts for programs, and speed without a gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_magi.training.parity.compare import Comparison, RunCurves


@dataclass(frozen=True)
class PlainReport:
    """Fixed thresholds, no noise run."""

    runs: list[Comparison]
    """First the baseline beside itself, then the runs."""
    controls: list[Comparison]

    @property
    def passed(self) -> bool:
        """Every run passes and every control fails."""
        return all(c.passed for c in self.runs) and not any(c.passed for c in self.controls)

    def table(self) -> list[str]:
        """Losses, gradient norms and largest differences of the runs, one line each."""
        every = [*self.runs, *self.controls]
        width = max(9, *(len(c.run.name) for c in every)) + 1
        head = (
            f"{'run':<{width}}{'steps':>6}{'first loss':>12}{'last loss':>12}"
            f"{'grad norm 1':>13}{'tokens/s':>11}{'step 1':>10}{'loss':>10}{'grad norm':>11}"
            f"  verdict"
        )
        g = every[0].gates
        limits = (
            f"{'thresholds':<{width}}{'':>54}{g.first_step:>10.0e}{g.any_step_loss:>10.0e}"
            f"{g.any_step_grad_norm:>11.0e}"
        )
        rows = [self._row(c, width) for c in every]
        speed = speed_lines([c.run for c in every])
        return [head, "-" * len(head), *rows, limits, *speed]

    def _row(self, c: Comparison, width: int) -> str:
        r = c.run
        differences = (c.first_step, c.loss_difference.max(), c.grad_norm_difference.max())
        shown = ["-"] * 3 if c is self.runs[0] else [f"{d:.1e}" for d in differences]
        return (
            f"{r.name:<{width}}{len(r.loss):>6}{r.loss[0]:>12.6f}{r.loss[-1]:>12.6f}"
            f"{r.grad_norm[0]:>13.6f}{r.median_tokens_per_second:>11,.0f}"
            f"{shown[0]:>10}{shown[1]:>10}{shown[2]:>11}  {self._verdict(c)}"
        )

    def _verdict(self, c: Comparison) -> str:
        if c is self.runs[0]:
            return "baseline"
        if any(c is control for control in self.controls):
            return control_verdict(not c.passed)
        return run_verdict(c.passed)

    def verdicts(self) -> list[str]:
        """One line a run."""
        return [f"{self._verdict(c)} {c.run.name}" for c in [*self.runs[1:], *self.controls]]

    def facts(self) -> dict[str, Any]:
        """All of it, for programs; inf and nan are null."""
        return {
            "passed": self.passed,
            "baseline": self.runs[0].run.name,
            "thresholds": vars(self.runs[0].gates),
            "runs": [self._facts(c) for c in self.runs],
            "controls": [self._facts(c) for c in self.controls],
        }

    def _facts(self, c: Comparison) -> dict[str, Any]:
        return run_facts(c.run, self.runs[0].run) | {
            "first_step_difference": number(c.first_step),
            "worst_loss_difference": number(c.loss_difference.max()),
            "worst_grad_norm_difference": number(c.grad_norm_difference.max()),
            "passed": c.passed,
        }

    def draw(self) -> Any:
        """Curves, differences and speed."""
        from megatron_magi.viz.curves_figure import curves_figure

        return curves_figure([*self.runs, *self.controls])


def run_verdict(passed: bool) -> str:
    """The verdict on a run that should pass."""
    return "PASS" if passed else "FAIL"


def control_verdict(caught: bool) -> str:
    """The verdict on a run that should fail."""
    return "CAUGHT" if caught else "NOT CAUGHT"


def number(value: float) -> float | None:
    """As JSON has it: inf and nan are null."""
    return float(value) if math.isfinite(value) else None


def run_facts(run: RunCurves, baseline: RunCurves) -> dict[str, Any]:
    """The facts of a run that every kind of comparison has."""
    speed = run.median_tokens_per_second
    return {
        "name": run.name,
        "steps": len(run.loss),
        "first_loss": number(run.loss[0]),
        "last_loss": number(run.loss[-1]),
        "tokens_per_second": speed,
        "tokens_per_second_per_process": speed / run.num_processes if run.num_processes else None,
        "num_processes": run.num_processes,
        "speed_ratio": _ratio(run, baseline),
    }


def speed_lines(runs: list[RunCurves]) -> list[str]:
    """Tokens/s of every run, the baseline first, and what their ratios mean."""
    baseline, *others = runs
    width = max(len(r.name) for r in runs)
    lines = ["", "speed: median tokens/s, first steps left out; it does not change the verdict, "
                 "and PASS says nothing about speed",
             f"  {baseline.name:<{width}}  {_tokens(baseline)}"]  # fmt: skip
    for run in others:
        ratio = _ratio(run, baseline)
        times = "" if ratio is None else f"; {ratio:.2f} times the baseline's median tokens/s"
        lines.append(f"  {run.name:<{width}}  {_tokens(run)}{times}{_where(run, baseline)}")
    return lines


def _tokens(run: RunCurves) -> str:
    speed, processes = run.median_tokens_per_second, run.num_processes
    if not processes:
        return f"{speed:,.0f} tokens/s"
    return f"{speed:,.0f} tokens/s, {speed / processes:,.0f} per process on {_processes(processes)}"


def _where(run: RunCurves, baseline: RunCurves) -> str:
    ours, theirs = run.num_processes, baseline.num_processes
    if not ours or not theirs:
        return "; on how many processes is not recorded"
    if ours != theirs:
        return f"; NOT the same number of processes: {ours}, the baseline {theirs}"
    return f"; measured on {_processes(ours)} each"


def _processes(num_processes: int) -> str:
    return "1 process" if num_processes == 1 else f"{num_processes} processes"


def _ratio(run: RunCurves, baseline: RunCurves) -> float | None:
    speed = baseline.median_tokens_per_second
    return run.median_tokens_per_second / speed if speed else None
