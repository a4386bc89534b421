#!/usr/bin/env bash
# Supervised fine-tuning of Llama-3 8B on packed conversations, which need no padding here: tensor
# parallelism 2 and context parallelism 4 on 8 GPUs. DATA is a file of conversations (JSON lines).
#   MEGATRON=PATH DATA=FILE TOKENIZER=NAME SAVE=FOLDER bash recipes/pretrain_gpt/packed_sft.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"

# shellcheck disable=SC2046
start "${common[@]}" $(checkpoints) --data-path "${DATA:?set DATA to a file of conversations}" \
  --sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer --tokenizer-model "${TOKENIZER:?set TOKENIZER}" \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --rotary-base 500000 \
  --seq-length 32768 --max-position-embeddings 131072 \
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 "$@"
