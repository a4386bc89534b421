# Sourced by the jobs beside it: what all of them need, and how they start on one node or under Slurm.
#   MEGATRON=PATH   a Megatron-LM checkout (needed; SCRIPT=PATH takes another pretrain script)
#   DATA=PREFIX     Megatron's .bin and .idx without their endings; unset: invented tokens
#   TOKENIZER=NAME  of HuggingFace; unset: token numbers as they are
#   SAVE=FOLDER     checkpoints are saved there, asynchronously, and loaded from there at a start
#   IMPL=local      without TransformerEngine
#   GPUS=8          of a node
#   MAGI_JOBS=PATH  this folder, for sbatch, which runs a copy of a job from another one
# More flags of Megatron's, or others in place of a job's, go behind the job's name. The learning rate is
# Llama 3's; one of our own comparisons failed at it, with a short warm-up (docs/convergence.md).
set -euo pipefail

script=${SCRIPT:-${MEGATRON:?set MEGATRON to a Megatron-LM checkout}/pretrain_gpt.py}
gpus=${GPUS:-8}

common=(
  --attention-backend magi --attention-dropout 0 --hidden-dropout 0
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --position-embedding-type rope --init-method-std 0.02
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
  --split 99,1,0 --log-interval 1 --eval-interval 500 --eval-iters 10 --log-throughput
)
if [ "${IMPL:-transformer_engine}" = local ]; then
  common+=(--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion)
else
  common+=(--transformer-impl transformer_engine)
fi

data() { # data VOCABULARY: of a job without a tokenizer
  if [ -n "${DATA:-}" ]; then printf '%s\n' --data-path "$DATA"; else echo --mock-data; fi
  if [ -n "${TOKENIZER:-}" ]; then
    printf '%s\n' --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
  else
    printf '%s\n' --tokenizer-type NullTokenizer --vocab-size "$1"
  fi
}

checkpoints() {
  [ -n "${SAVE:-}" ] || return 0
  printf '%s\n' --save "$SAVE" --load "$SAVE" --save-interval 500 --ckpt-format torch_dist \
    --async-save --use-persistent-ckpt-worker --async-strategy mcore
}

start() { # start FLAGS: a process on each GPU, of this node or of the Slurm job's
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  local run=(torchrun --nproc-per-node "$gpus")
  if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    local nodes
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # srun does not take over sbatch's --cpus-per-task
    run=(srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
      --kill-on-bad-exit=1 torchrun --nproc-per-node "$gpus"
      --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
      --rdzv-endpoint "${nodes%%$'\n'*}:29500")
  fi
  exec "${run[@]}" -m megatron_magi.run "$script" "$@"
}
