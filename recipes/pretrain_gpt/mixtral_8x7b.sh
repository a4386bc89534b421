#!/usr/bin/env bash
# Mixtral 8x7B: experts on 8 GPUs, context parallelism 4 and two pipeline stages, on 2 nodes.
#   export MEGATRON=PATH [DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] MAGI_JOBS=$PWD/recipes/pretrain_gpt
#   sbatch --nodes 2 --gpus-per-node 8 --ntasks-per-node 1 --cpus-per-task 64 \
#     recipes/pretrain_gpt/mixtral_8x7b.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# shellcheck disable=SC2046
start "${common[@]}" $(data 32000) $(checkpoints) \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --rotary-base 1000000 \
  --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
  --seq-length 32768 --max-position-embeddings 32768 \
  --context-parallel-size 4 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 \
  --micro-batch-size 1 --global-batch-size 64 --train-iters 10000 \
  --dataloader-inter-document-masking "$@"
