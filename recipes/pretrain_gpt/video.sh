#!/usr/bin/env bash
# A model on video: every frame of 1,536 tokens sees itself and the earlier frames of its sequence;
# context parallelism 8 on one node. The mask is the function `frames` of video_mask.py, beside this.
#   MEGATRON=PATH [DATA=PREFIX SAVE=FOLDER] bash recipes/pretrain_gpt/video.sh [flags]
here=${MAGI_JOBS:-$(dirname "${BASH_SOURCE[0]}")} # sbatch runs a copy: MAGI_JOBS names this folder
. "$here/start.sh"
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

# shellcheck disable=SC2046
start "${common[@]}" $(data 65536) $(checkpoints) --magi-mask video_mask:frames \
  --num-layers 24 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 \
  --seq-length 98304 --max-position-embeddings 98304 \
  --context-parallel-size 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 10000 "$@"
