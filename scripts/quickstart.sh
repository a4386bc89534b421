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
# Nothing here is compiled: torch's compiler then need not be imported, in eight processes.
export TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1
"$python" -c 'import sys, importlib.metadata as m
print("Python", sys.version.split()[0], *(f"{n} {m.version(n)}" for n in ("torch", "megatron-core")), sep=", ")' |
  sed 's/, / /'

echo "== 1/5 packing the Python standard library's sources"
"$python" -W ignore -m megatron_magi data "$("$python" -c 'import os; print(os.path.dirname(os.__file__))')" \
  --output "$data" --include '*.py' --split '(async )?def |class ' \
  --exclude site-packages dist-packages test tests idlelib lib2to3 pydoc_data ensurepip \
  --max-bytes 4000000 | tail -1

job=(-m megatron_magi.run pretrain_gpt --recipe tiny_llama_cpu --train-iters 10 --lr-warmup-iters 2
  --data-path "$data" --data-cache-path "$runs/cache" --log-timers-to-tensorboard)
magi=(--attention-backend magi --context-parallel-size 2)

# Imports take most of a run's time, and one core; so what does not wait for another runs at the same time.
declare -A started
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
start() { # NAME command...
  "${@:2}" >"$runs/$1.log" 2>&1 &
  started[$1]=$!
}
finish() { # NAME
  wait "${started[$1]}" || {
    tail -25 "$runs/$1.log" >&2
    echo "error: the run $1 failed; its log is $runs/$1.log" >&2
    exit 1
  }
}
train() { # PROCESSES NAME flag...
  # The names are the quick start's own, so running it again may replace what it left.
  rm -rf "${runs:?}/$2"
  # Megatron prints about 950 lines.
  start "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" "${job[@]}" \
    --tensorboard-dir "$runs/$2" --save "$runs/$2/save" --save-interval 1000 --no-save-optim \
    --save-wgrads-interval 10 "${@:3}"
}
echo "== 2/5 baseline: Megatron's dense attention, context parallelism 1"
train 1 dense
echo "== 3/5 the same with ${magi[*]}, at the same time"
train 2 magi "${magi[@]}"
start shares "$python" -m megatron_magi viz --data "$data" --seq-length 32768 --cp 4 --heads 32,8,64 \
  --only shares --out "$runs"
finish dense
echo "== 4/5 negative control: the same with one document boundary moved by a token (--magi-mask)"
train 2 moved_boundary "${magi[@]}" --magi-mask examples/moved_boundary.py:moved_boundary
finish magi
finish moved_boundary
echo "== 5/5 comparison: losses, gradient norms, and all gradients of step 10"
"$python" -m megatron_magi compare "$runs/dense" "$runs/magi" --expect-fail "$runs/moved_boundary" \
  --out "$runs/loss"
echo "the runs shared this machine's cores, so their tokens/s say nothing here"
finish shares
cat "$runs/shares.log"
echo "next: torchrun -m megatron_magi.run pretrain_gpt.py <your flags> --attention-backend magi --attention-dropout 0"
echo "      your own Megatron job: docs/guides/megatron_lm.md; your own text: docs/start/quickstart.md"
