"""Reports of comparisons: a table, verdicts, facts for programs, and speed without a gate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatron_magi.compare.differences import Comparison, RunCurves
from megatron_magi.compare.noise_floor import NoiseFloor
from megatron_magi.compare.noise_gates import GateResult, Judged

WORDS = {True: "pass", False: "FAIL", None: "skip"}


@dataclass(frozen=True)
class PlainReport:
    """Fixed thresholds, no noise run."""

    runs: list[Comparison]
    """First the baseline against itself, then the runs."""
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
            f"{'gradient':>10}  verdict"
        )
        g = every[0].gates
        limits = (
            f"{'thresholds':<{width}}{'':>54}{g.first_step:>10.0e}{g.any_step_loss:>10.0e}"
            f"{g.any_step_grad_norm:>11.0e}{g.gradient:>10.0e}"
        )
        rows = [self._row(c, width) for c in every]
        speed = speed_lines([c.run for c in every])
        return [head, "-" * len(head), *rows, limits, *speed]

    def _row(self, c: Comparison, width: int) -> str:
        r = c.run
        differences = (
            *(c.first_step, c.loss_difference.max(), c.grad_norm_difference.max()),
            c.gradient,
        )
        shown = ["-" if c is self.runs[0] or d is None else f"{d:.1e}" for d in differences]
        return (
            f"{r.name:<{width}}{len(r.loss):>6}{r.loss[0]:>12.6f}{r.loss[-1]:>12.6f}"
            f"{r.grad_norm[0]:>13.6f}{r.median_tokens_per_second:>11,.0f}"
            f"{shown[0]:>10}{shown[1]:>10}{shown[2]:>11}{shown[3]:>10}  {self._verdict(c)}"
        )

    def _verdict(self, c: Comparison) -> str:
        if c is self.runs[0]:
            return "baseline"
        if any(c is control for control in self.controls):
            return "NOT CAUGHT" if c.passed else "CAUGHT"
        return "PASS" if c.passed else "FAIL"

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
            "worst_gradient_error": None if c.gradient is None else number(c.gradient),
            "passed": c.passed,
        }

    def draw(self) -> Any:
        """Curves, differences and speed."""
        from megatron_magi.viz.curves_figure import curves_figure

        return curves_figure([*self.runs, *self.controls])


def number(value: float) -> float | None:
    """The number for JSON, in which inf and nan become null."""
    return float(value) if math.isfinite(value) else None


def run_facts(run: RunCurves, baseline: RunCurves) -> dict[str, Any]:
    """The facts of a run that every kind of comparison has."""
    speed = run.median_tokens_per_second
    return {
        "name": run.name,
        "steps": len(run.loss),
        "first_loss": number(run.loss[0]),
        "last_loss": number(run.loss[-1]),
        "tokens_per_second": number(speed),
        "tokens_per_second_per_process": number(speed / (run.num_processes or math.nan)),
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
    if math.isnan(speed):
        return "speed not recorded"
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
    return number(run.median_tokens_per_second / speed) if speed else None


@dataclass(frozen=True)
class NoiseReport:
    """Runs that should pass, and controls that should not, with baseline and noise runs."""

    floor: NoiseFloor
    runs: list[Judged]
    controls: list[Judged]

    @property
    def passed(self) -> bool:
        """Every run passes and every control is caught."""
        return all(j.passed for j in self.runs) and all(j.caught_by for j in self.controls)

    def table(self) -> list[str]:
        """Every gate of every run, then the verdicts and the speeds."""
        f = self.floor
        baseline = f.baseline.curves
        lines = [
            f"baseline {baseline.name}: {len(baseline.loss)} steps, loss "
            f"{baseline.loss[0]:.4f} -> {baseline.loss[-1]:.4f}, {f.dtype}",
            *(_noise_line(noise.curves) for noise in f.noises),
            f"noise counts as at least one rounding step: {f.gradient_floor:.1e} of a gradient, "
            f"{f.loss_floor:.1e} of a loss",
        ]
        for judged in [*self.runs, *self.controls]:
            lines += ["", f"{judged.run.name}: {self._verdict(judged)}"]
            lines += [_gate_line(r) for r in judged.results]
        others = [j.run for j in [*self.runs, *self.controls]]
        return [*lines, *speed_lines([baseline, *(n.curves for n in f.noises), *others])]

    def _verdict(self, judged: Judged) -> str:
        skipped = [r.name for r in judged.results if r.passed is None]
        note = f" (skipped: {', '.join(skipped)})" if skipped else ""
        if any(judged is control for control in self.controls):
            by = f" by {', '.join(judged.caught_by)}" if judged.caught_by else ""
            return f"{'CAUGHT' if judged.caught_by else 'NOT CAUGHT'}{by}{note}"
        return f"{'PASS' if judged.passed else 'FAIL'}{note}"

    def verdicts(self) -> list[str]:
        """One line a run."""
        return [f"{self._verdict(j).split(' (')[0]} {j.run.name}"
                for j in [*self.runs, *self.controls]]  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """All of it, for programs; a number that is inf, nan or not there is null."""
        f, baseline = self.floor, self.floor.baseline.curves
        return {
            "passed": self.passed,
            "baseline": run_facts(baseline, baseline),
            "noise": [run_facts(noise.curves, baseline) for noise in f.noises],
            "thresholds": asdict(f.gates),
            "dtype": f.dtype,
            "gradient_floor": f.gradient_floor,
            "loss_floor": f.loss_floor,
            "runs": [self._facts(j, False) for j in self.runs],
            "controls": [self._facts(j, True) for j in self.controls],
        }

    def _facts(self, judged: Judged, is_control: bool) -> dict[str, Any]:
        outcome: dict[str, Any] = {"passed": judged.passed}
        if is_control:
            outcome["caught_by"] = judged.caught_by
        speed = run_facts(judged.run, self.floor.baseline.curves)
        return speed | outcome | {"gates": [_gate_facts(r) for r in judged.results]}

    def draw(self) -> Any:
        """Curves above, differences with the noise band below."""
        from megatron_magi.viz.curves_figure import noise_figure

        return noise_figure(self.runs, self.controls)


def _noise_line(noise: RunCurves) -> str:
    steps = f"{len(noise.loss)} step" + ("s" if len(noise.loss) > 1 else "")
    return f"noise     {noise.name}: {steps}, loss {noise.loss[0]:.4f} -> {noise.loss[-1]:.4f}"


def _gate_line(result: GateResult) -> str:
    numbers = f"{'':>24}"
    if result.passed is not None:
        sign = ">=" if result.name == "loss_drop" else "<="
        numbers = f"{result.value:>10.3g} {sign} {result.limit:<10.3g}"
    return f"  {WORDS[result.passed]}  {result.name:<12}{numbers}  {result.text}"


def _gate_facts(result: GateResult) -> dict[str, Any]:
    facts = asdict(result)
    facts |= {name: number(facts[name]) for name in ("value", "limit")}
    value, limit = facts["value"], facts["limit"]
    facts["ratio"] = value / limit if value is not None and limit else None
    return facts
