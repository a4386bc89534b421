#!/usr/bin/env bash
# Sets up .venv and runs every check and test that needs no GPU, cheapest first.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_env.sh .venv dev
bin=.venv/bin

echo "== format and lint"
"$bin/python" -m ruff format --check .
"$bin/python" -m ruff check .
find megatron_magi/csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' |
  xargs "$bin/clang-format" --dry-run --Werror
echo "== types"
"$bin/python" -m mypy
echo "== tests"
"$bin/python" -m pytest -q -n 2 --dist loadfile -m "not gpu and not multi_gpu and not benchmark" "$@"
