#!/usr/bin/env bash
# Sets up .venv and runs every check and the tests that need no GPU. A step that fails stops no other
# one; the exit code is the worst.
#   bash scripts/test.sh                        what a change has to pass: 11 minutes on two cores
#   bash scripts/test.sh --all                  slow tests and HuggingFace's models too
#   bash scripts/test.sh --cuda                 builds the CUDA library too, where there is an nvcc
#   bash scripts/test.sh [pytest arguments]     checks, and these tests
# Pretrain scripts of Megatron-LM checkouts: scripts/test_megatron.sh
set -euo pipefail
cd "$(dirname "$0")/.."

all=false cuda=false
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=true ;;
    --cuda) cuda=true ;;
    *) break ;;
  esac
  shift
done

bash scripts/setup_env.sh .venv dev
python=.venv/bin/python
worst=0 failed=()

# step TITLE COMMAND...
step() {
  local title=$1 code=0
  shift
  echo "== $title ($(date +%T))"
  "$@" || code=$?
  [ "$code" -eq 0 ] || failed+=("$title: exit code $code")
  [ "$code" -le "$worst" ] || worst=$code
}

clang_format() {
  find megatron_magi/csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 "$python" -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror
}

cuda_library() {
  command -v nvcc >/dev/null || { echo "skipped: there is no nvcc"; return; }
  "$python" -m megatron_magi.build && "$python" -m tools.check_ptxas
}

# beside NAME PACKAGE...: packages in a folder of their own, .venv/NAME, because with them on the path
# others behave differently.
beside() {
  local folder=.venv/$1
  shift
  [ -d "$folder" ] && return
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --ignore-requires-python --target "$folder.partial" "$@" && mv "$folder.partial" "$folder"
}

# tests [-p FOLDER] PYTEST ARGUMENTS...: with .venv/FOLDER in front of the path
# One thread in each process: threads of two that run at once would wait for each other's cores.
# Compiled tests are kept: pytest rewrites their asserts in ten seconds.
run_tests() {
  local path=""
  [ "$1" != -p ] || { path=$PWD/.venv/$2; shift 2; }
  PYTHONDONTWRITEBYTECODE='' OMP_NUM_THREADS=1 PYTHONPATH=$path "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
}

huggingface() {
  beside huggingface transformers==5.24.0 tokenizers huggingface_hub safetensors regex ||
    { echo "skipped: there is no transformers to install here"; return; }
  run_tests -p huggingface -m "not slow" tests/huggingface tests/examples/test_huggingface.py
}

without_gpu="not gpu and not multi_gpu and not benchmark"
step format "$python" -m ruff format --check .
step lint "$python" -m ruff check .
step "format of C++" clang_format
step types "$python" -m mypy
! $cuda || step "CUDA library, and what ptxas said about it" cuda_library
if [ $# -gt 0 ]; then
  step tests run_tests -m "$without_gpu" "$@"
elif ! $all; then
  step tests run_tests -m "$without_gpu and not slow"
else
  step "all tests" run_tests -m "$without_gpu"
  step "models of HuggingFace Transformers" huggingface
fi

echo "== end ($(date +%T))"
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
exit "$worst"
