#!/usr/bin/env bash
# Sets up .venv and runs every check and test that needs no GPU, cheapest first.
# Then layouts, training and the launcher once more on the other megatron-core: 0.19.2 where this
# Python's is 0.16.1, and the other way round. Pretrain scripts of checkouts: scripts/test_megatron.sh
#   bash scripts/test.sh [pytest arguments]     with arguments: the first megatron-core only
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_env.sh .venv dev
python=.venv/bin/python

echo "== format and lint"
"$python" -m ruff format --check .
"$python" -m ruff check .
find megatron_magi/csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 "$python" -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror
echo "== types"
"$python" -m mypy
if command -v nvcc >/dev/null; then
  echo "== CUDA library, and what ptxas said about it"
  "$python" -m megatron_magi.build
  "$python" scripts/check_ptxas.py
else
  echo "== CUDA library: skipped, there is no nvcc"
fi
echo "== tests"
"$python" -m pytest -q -n 2 --dist loadfile -m "not gpu and not multi_gpu and not benchmark" "$@"
[ $# -eq 0 ] || exit 0

# Triton has wheels for Linux alone; its interpreter runs the fused kernels on the CPU. It stands in a
# folder of its own, because with it on the path other packages behave differently.
triton=.venv/triton
if [ ! -d "$triton" ] && "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
  --only-binary=:all: --target "$triton.partial" triton; then
  mv "$triton.partial" "$triton"
fi
if [ -d "$triton" ]; then
  echo "== fused kernels in Triton's interpreter"
  PYTHONPATH=$PWD/$triton "$python" -m pytest -q -n 2 --dist loadfile \
    tests/adapter/fused/test_{cross_entropy,layer_spec,norm,parts,qkv_rope,residual,second_derivatives,swiglu,word_rows}.py \
    tests/training/test_fused_training.py
else
  echo "== fused kernels in Triton's interpreter: skipped, there is no triton to install here"
fi

mine=$("$python" -c 'from megatron_magi.adapter.compat import installed_version; print(installed_version())')
other=0.19.2
[ "$mine" = 0.16.1 ] || other=0.16.1
echo "== adapter and training on megatron-core $other (so far: $mine)"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "skipped: megatron-core $other has no wheel for Python 3.10"
  exit 0
fi
folder=.venv/megatron-core-$other
if [ ! -d "$folder" ]; then
  # Its metadata asks for Python 3.12, but the wheel for 3.11 is there and works.
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --ignore-requires-python --target "$folder.partial" "megatron-core==$other"
  mv "$folder.partial" "$folder"
fi
export PYTHONPATH=$PWD/$folder
"$python" -c "from megatron_magi.adapter.compat import installed_version as v; assert str(v()) == '$other', v()"
"$python" -m pytest -q -n 2 --dist loadfile -m "not one_version" \
  tests/adapter tests/examples tests/launcher \
  tests/training/test_checkpoint.py tests/training/test_dry_run.py \
  tests/training/test_weights_checkpoint.py
