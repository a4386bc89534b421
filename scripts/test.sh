#!/usr/bin/env bash
# Sets up .venv and runs every check and test that needs no GPU, cheapest first.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_env.sh .venv dev
python=.venv/bin/python

echo "== format and lint"
"$python" -m ruff format --check .
"$python" -m ruff check .
find megatron_magi/csrc \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 "$python" -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror
echo "== types"
"$python" -m mypy
echo "== tests"
"$python" -m pytest -q -n 2 --dist loadfile -m "not gpu and not multi_gpu and not benchmark" "$@"
