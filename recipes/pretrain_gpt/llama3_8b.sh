#!/usr/bin/env bash
# Llama-3 8B on packed documents of a 64K stream, in fp8 linear layers: tensor parallelism 2 and
# context parallelism 4 on 8 GPUs. Needs Megatron 0.19 or later (--dataloader-inter-document-masking).
#   MEGATRON=PATH [DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] bash recipes/pretrain_gpt/llama3_8b.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

fp8=(--fp8-format hybrid --fp8-recipe tensorwise)
[ "${IMPL:-}" != local ] || fp8=()
# shellcheck disable=SC2046
start "${common[@]}" $(data 128256) $(checkpoints) "${fp8[@]}" \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --rotary-base 500000 \
  --seq-length 65536 --max-position-embeddings 131072 \
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 \
  --recompute-granularity selective --dataloader-inter-document-masking "$@"
