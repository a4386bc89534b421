"""`--recipe` takes the YAML files of Megatron-LM's functional tests as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron_checkout

ROOT = Path(__file__).parents[2]
DRIVER = """
import argparse, os, sys
from pathlib import Path
from megatron_magi import recipe
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels
skip_compilation_of_wheels()
install_cpu_training()
from megatron_magi.launcher.preflight import megatron_parser

GIVEN = {"REPEAT": "1", "TOKENIZER_TYPE": "NullTokenizer"}

class AnyVariable(dict):
    def get(self, name, default=None):
        return GIVEN.get(name, f"/{name}")

# Its value "2 2" without brackets is one word to Megatron's own runner too, and no integer.
REFUSED = {"gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p_nondeterministic"}
parser, environment, read = megatron_parser(), os.environ, 0
for path in sorted(Path(sys.argv[1]).rglob("model_config.yaml")):
    flags = recipe._read(path).get("MODEL_ARGS")
    if not flags or not all(name.startswith("--") for name in flags):
        continue  # of a converter or of NeMo, which take other words
    os.environ = AnyVariable()
    words = recipe.flags_of(path)
    os.environ = environment
    given = [name for name, value in flags.items() if value not in ("", "false")]
    assert [w for w in words if w.partition("=")[0] in given], path
    read += 1
    try:
        parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        if path.parent.name not in REFUSED:
            sys.exit(f"{path}: {error}")
print(read)
"""


def test_every_file_expands_to_flags_that_megatrons_parser_takes(megatron_checkout: Path) -> None:
    """Flags that the parser does not know are passed over: scripts add some themselves."""
    paths = [str(megatron_checkout), str(ROOT), os.environ.get("PYTHONPATH", "")]
    folder = megatron_checkout / "tests" / "functional_tests" / "test_cases"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 150
