#!/usr/bin/env bash
# A tiny Llama on invented documents, context parallelism 2, on two processes without a GPU.
#   MEGATRON=PATH bash recipes/pretrain_gpt/tiny_cpu.sh [flags]
export IMPL=local GPUS=2 CUDA_VISIBLE_DEVICES= TORCH_COMPILE_DISABLE=1
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# In fp32, whose kernel on the CPU is PyTorch's; there is nothing to overlap.
on_cpu=()
for flag in "${common[@]}"; do
  case $flag in --bf16 | --overlap-grad-reduce | --overlap-param-gather) ;; *) on_cpu+=("$flag") ;; esac
done
# shellcheck disable=SC2046
start "${on_cpu[@]}" $(data 127) $(checkpoints) \
  --distributed-backend gloo --use-cpu-initialization --no-bias-swiglu-fusion \
  --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 \
  --group-query-attention --num-query-groups 2 \
  --seq-length 97 --max-position-embeddings 128 --make-vocab-size-divisible-by 64 \
  --context-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 "$@"
