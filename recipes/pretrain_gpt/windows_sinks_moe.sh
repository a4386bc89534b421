#!/usr/bin/env bash
# A model of GPT-OSS's kind: windows of 128 tokens in every second layer, learnable sinks, YaRN, and
# experts; context parallelism 4 and expert parallelism 8 on 8 GPUs.
#   MEGATRON=PATH [DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] bash recipes/pretrain_gpt/windows_sinks_moe.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# shellcheck disable=SC2046
start "${common[@]}" $(data 201088) $(checkpoints) \
  --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 \
  --kv-channels 64 --group-query-attention --num-query-groups 8 --no-rope-fusion \
  --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32 \
  --yarn-original-max-position-embeddings 4096 --softmax-type learnable \
  --window-size 127,0 --window-attn-skip-freq 2 \
  --num-experts 32 --moe-router-topk 4 --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
  --seq-length 32768 --max-position-embeddings 131072 \
  --context-parallel-size 4 --expert-model-parallel-size 8 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 "$@"
