"""The report of a comparison with a noise run: each gate of each run, with value and limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_magi.cli.compare_report import (
    control_verdict,
    number,
    run_facts,
    run_verdict,
    speed_lines,
)
from megatron_magi.training.parity.compare import RunCurves
from megatron_magi.training.parity.noise_floor import NoiseFloor
from megatron_magi.training.parity.noise_gates import GateResult, Judged

WORDS = {True: "pass", False: "FAIL", None: "skip"}


@dataclass(frozen=True)
class NoiseReport:
    """Runs that should pass, and controls that should not, beside baseline and noise runs."""

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
            return f"{control_verdict(bool(judged.caught_by))}{by}{note}"
        return f"{run_verdict(judged.passed)}{note}"

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
        from megatron_magi.viz.noise_figure import noise_figure

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
