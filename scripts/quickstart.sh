#!/usr/bin/env bash
# From nothing to a checked training run, without a GPU: packs the Python standard library's sources,
# trains a tiny Llama with context parallelism 2, the baseline with Megatron's own dense attention,
# and a copy with one document boundary moved that the comparison must catch.
#   bash scripts/quickstart.sh          writes only .venv/ and runs/
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_env.sh .venv quickstart
python=.venv/bin/python
runs=runs/quickstart
recipe=recipes/own_trainer/tiny_llama_cpu.yaml
mkdir -p "$runs"

echo "== 1/5 packing the Python standard library's sources"
"$python" scripts/prepare_data.py "$("$python" -c 'import os; print(os.path.dirname(os.__file__))')" \
  --output runs/data/python_stdlib --include '*.py' --split '(async )?def |class ' \
  --exclude site-packages dist-packages test tests idlelib lib2to3 pydoc_data ensurepip \
  --max-bytes 4000000

train() { # NAME override...
  local name=$1
  shift
  # The names are the quick start's own, so running it again may replace what it left.
  "$python" scripts/pretrain.py "$recipe" "name=$name" "log.dir=$runs" log.interval=20 \
    log.overwrite=true "$@"
}
echo "== 2/5 baseline: Megatron's dense attention, context parallelism 1"
train dense attention=dense parallel.cp=1
echo "== 3/5 megatron_magi: context parallelism 2"
train magi
echo "== 4/5 negative control: the same with one document boundary moved by a token"
train moved_boundary data.moved_boundary=1
echo "== 5/5 comparison"
"$python" scripts/quickstart_report.py "$runs" --recipe "$recipe"
