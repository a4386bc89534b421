#!/usr/bin/env bash
# Starts a recipe: a process on each GPU of this node, or of every node of a Slurm job.
#   [MEGATRON=PATH DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] bash scripts/launch.sh RECIPE [flags]
#   RECIPE          a YAML file, or a name such as llama3_1b_cp8 (recipes/)
#   flags           Megatron's or this package's; they override the recipe's
#   MEGATRON=PATH   a Megatron-LM checkout. SCRIPT=PATH names another pretrain script; without both,
#                   the packaged pretrain_gpt trains with the installed megatron-core
#   DATA=PREFIX     Megatron's .bin and .idx without their endings, or a blend; unset: mock data
#   TOKENIZER=NAME  of HuggingFace; unset: token numbers as they are
#   SAVE=FOLDER     saves checkpoints there asynchronously, and loads the newest one at a start
#   IMPL=local      trains without TransformerEngine
#   GPUS=8          processes of a node; default: its GPUs
set -euo pipefail

fail() { echo "error: $1" >&2; exit 2; }
[ $# -gt 0 ] || fail "a recipe is required, got none; bash scripts/launch.sh RECIPE [flags]"
recipe=$1
shift

gpus=${GPUS:-${SLURM_GPUS_ON_NODE:-$(python -c 'import torch; print(torch.cuda.device_count())')}}
[[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "one process or more is required, got $gpus; set GPUS"

script=${SCRIPT:-${MEGATRON:+$MEGATRON/pretrain_gpt.py}}
words=("${script:-pretrain_gpt}")

# In front of the recipe, which may have data and a tokenizer of its own.
if [ -n "${DATA:-}" ]; then
  # shellcheck disable=SC2206  # a blend is several words
  words+=(--data-path $DATA)
else
  words+=(--mock-data)
fi
if [ -n "${TOKENIZER:-}" ]; then
  words+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
  words+=(--tokenizer-type NullTokenizer)
fi
words+=(--recipe "$recipe")
[ -z "${SAVE:-}" ] ||
  words+=(--save "$SAVE" --load "$SAVE" --save-interval 500 --ckpt-format torch_dist
    --async-save --use-persistent-ckpt-worker --async-strategy mcore)
[ "${IMPL:-}" != local ] ||
  words+=(--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion)

run=(torchrun --nproc-per-node "$gpus")
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # not into `head`: pipefail sees SIGPIPE
  # srun does not inherit sbatch's --cpus-per-task.
  run=(srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
    --kill-on-bad-exit=1 "${run[@]}" --nnodes "$SLURM_JOB_NUM_NODES"
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
    --rdzv-endpoint "${nodes%%$'\n'*}:${PORT:-29500}")
fi
exec "${run[@]}" -m megatron_magi.run "${words[@]}" "$@"
