"""What CONTRIBUTING and the pre-commit file promise is what the checks do."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_pre_commit_runs_what_the_test_script_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    script = (ROOT / "scripts" / "test.sh").read_text()
    for hook in local["hooks"]:
        words = hook["entry"].replace("python -m ", "").replace(" --force-exclude", "").split()
        assert words[0].replace("-", "_") in script.replace("-", "_"), hook["id"]
