#!/usr/bin/env bash
# A model of DeepSeek-V2-Lite's kind: multi-latent attention with YaRN, and experts whose balance is
# kept sample by sample; context parallelism 4 and expert parallelism 8 on 8 GPUs.
#   MEGATRON=PATH [DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER] bash recipes/pretrain_gpt/latent_moe.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# shellcheck disable=SC2046
start "${common[@]}" $(data 102400) $(checkpoints) \
  --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 \
  --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \
  --v-head-dim 128 --rotary-scaling-factor 40 --qk-layernorm \
  --num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6 \
  --moe-shared-expert-intermediate-size 2816 --moe-layer-freq '([0]+[1]*26)' \
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 \
  --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
  --seq-length 32768 --max-position-embeddings 163840 \
  --context-parallel-size 4 --expert-model-parallel-size 8 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 "$@"
