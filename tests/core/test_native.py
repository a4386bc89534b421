"""Without the compiled planner the package says what to do."""

import subprocess
import sys


def test_missing_extension_is_one_clear_error() -> None:
    code = "import sys; sys.modules['megatron_magi._solver'] = None; import megatron_magi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs its compiled planner" in done.stderr and "pip install -e /" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "megatron_magi.requirements.MissingRequirement: "
    )
