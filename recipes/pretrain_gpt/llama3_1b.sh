#!/usr/bin/env bash
# Llama-3.2 1B on packed documents of a 32K stream, context parallelism 8: one node of 8 GPUs.
#   MEGATRON=PATH [DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] bash recipes/pretrain_gpt/llama3_1b.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# shellcheck disable=SC2046
start "${common[@]}" $(data 128256) $(checkpoints) \
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --rotary-base 500000 --use-rope-scaling \
  --seq-length 32768 --max-position-embeddings 131072 \
  --context-parallel-size 8 --micro-batch-size 1 --global-batch-size 16 --train-iters 10000 \
  --dataloader-inter-document-masking "$@"
