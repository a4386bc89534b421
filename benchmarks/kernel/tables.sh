#!/usr/bin/env bash
# The records of all kernel tables in docs/results/attention.md, on one machine within ten minutes.
#   bash benchmarks/kernel/tables.sh FOLDER [COMMIT]
# Peers that cannot be imported have no column. FlexAttention compiles in 4 processes. Then
# benchmarks/records/ gets them as kernel_GPU_DATE.json and so on.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?"give the folder of the records"}
commit=${2:-$(git rev-parse --short=8 HEAD)}
mkdir -p "$folder"

# speed RECORD ARGUMENTS...: cells that join the record
speed() {
  local record=$folder/$1.json
  shift
  python3 -m benchmarks.kernel.speed --commit "$commit" --append --record "$record" --rounds 5 "$@"
}
option() {
  local name=$1
  shift
  python3 -m benchmarks.kernel.options "$name" --commit "$commit" --record "$folder/$name.json" "$@"
}

documents=causal,full,packed_causal,packed_full
flash=ours,fa3,fa4
speed kernel --impls ours,cudnn,fa3,fa4 --masks "$documents,swa1024,tiny64,packed_block_causal" \
  --seqlens 16384,4096,65536 --cell-seconds 0.6
speed kernel --impls ours,flex --masks shared_question,prefix_tree --seqlens 16384,4096 \
  --cell-seconds 0.4 --compile-jobs 4
speed kernel --impls "$flash" --masks causal,full --seqlens 131072 --rounds 3 --cell-seconds 0.6
for head_dim in 64 96; do
  speed head_sizes --head-dim "$head_dim" --impls "$flash" --masks "$documents" \
    --seqlens 16384,4096 --cell-seconds 0.4
done
speed head_sizes --head-dim 192 --value-dim 128 --heads 16,16 --impls "$flash" \
  --masks "$documents" --seqlens 16384,4096 --cell-seconds 0.4
speed head_sizes --head-dim 256 --heads 16,4 --impls "$flash" --masks "$documents" \
  --seqlens 16384,4096 --cell-seconds 0.4
option deterministic --rounds 5 --cell-seconds 0.3
option softcap --masks full causal --seqlens 16384 --sizes 1 8 --rounds 7 --cell-seconds 0.4
