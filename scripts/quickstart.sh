#!/usr/bin/env bash
# From nothing to a checked training run, without a GPU: packs the Python standard library's sources
# and trains a tiny Llama with Megatron's own trainer: with its dense attention, with
# --attention-backend magi at context parallelism 2, and with one document boundary moved by
# --magi-mask, which the comparison must catch.
#   bash scripts/quickstart.sh          writes only .venv/ and runs/
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup_env.sh .venv quickstart
python=.venv/bin/python
runs=runs/quickstart
data=runs/data/python_stdlib
mkdir -p "$runs"
"$python" -c 'import sys, importlib.metadata as m
print("Python", sys.version.split()[0], *(f"{n} {m.version(n)}" for n in ("torch", "megatron-core")), sep=", ")' |
  sed 's/, / /'

echo "== 1/5 packing the Python standard library's sources"
"$python" -W ignore -m megatron_magi data "$("$python" -c 'import os; print(os.path.dirname(os.__file__))')" \
  --output "$data" --include '*.py' --split '(async )?def |class ' \
  --exclude site-packages dist-packages test tests idlelib lib2to3 pydoc_data ensurepip \
  --max-bytes 4000000 | tail -1

job=(-m megatron_magi.run pretrain_gpt --recipe tiny_llama_cpu --train-iters 20
  --data-path "$data" --data-cache-path "$runs/cache" --log-timers-to-tensorboard)
magi=(--attention-backend magi --context-parallel-size 2)

train() { # PROCESSES NAME flag...
  local processes=$1 name=$2
  shift 2
  # The names are the quick start's own, so running it again may replace what it left.
  rm -rf "${runs:?}/$name"
  # Megatron prints about 950 lines.
  OMP_NUM_THREADS=$((2 / processes)) "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$processes" "${job[@]}" --tensorboard-dir "$runs/$name" --save "$runs/$name/save" \
    --save-interval 1000 --no-save-optim --save-wgrads-interval 10 "$@" >"$runs/$name.log" 2>&1 || {
    tail -25 "$runs/$name.log" >&2
    echo "error: the run $name failed; its log is $runs/$name.log" >&2
    exit 1
  }
}
echo "== 2/5 baseline: Megatron's dense attention, context parallelism 1"
train 1 dense
echo "== 3/5 the same with ${magi[*]}"
train 2 magi "${magi[@]}"
echo "== 4/5 negative control: the same with one document boundary moved by a token (--magi-mask)"
train 2 moved_boundary "${magi[@]}" --magi-mask examples/moved_boundary.py:moved_boundary
echo "== 5/5 comparison: losses, gradient norms, and all gradients of step 10"
"$python" -m megatron_magi compare "$runs/dense" "$runs/magi" --expect-fail "$runs/moved_boundary" \
  --out "$runs/loss"
"$python" -m megatron_magi viz --data "$data" --seq-length 32768 --cp 4 --heads 32,8,64 --only shares \
  --out "$runs"
echo "next: torchrun -m megatron_magi.run pretrain_gpt.py <your flags> --attention-backend magi"
echo "      your own Megatron job: docs/guides/megatron_lm.md; your own text: docs/start/quickstart.md"
