"""What runs are compared with: one run, or the mean of several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Baseline:
    """The folders of one run, or of several whose mean is the baseline."""

    runs: tuple[Path, ...]
    """One or more, each with the steps.csv of a run."""

    @property
    def name(self) -> str:
        """As reports and gradient_errors.csv call it."""
        names = [run.name for run in self.runs]
        return names[0] if len(names) == 1 else f"mean of {', '.join(sorted(names))}"

    def without(self, run: Path) -> Baseline:
        """The other runs."""
        return Baseline(tuple(other for other in self.runs if other != run))
