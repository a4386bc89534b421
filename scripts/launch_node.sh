#!/usr/bin/env bash
# Trains a recipe on one host: torchrun with a process on each of its GPUs.
#   bash scripts/launch_node.sh RECIPE [section.key=value ...]
#   NPROC=2 bash scripts/launch_node.sh RECIPE ...          on so many GPUs, or CPU processes
# Needs the Python with megatron_magi first on the PATH (or this folder's .venv activated). More
# processes than the recipe's tp x pp x cp are data-parallel replicas.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "error: a recipe is needed, got none; bash scripts/launch_node.sh RECIPE [section.key=value ...]" >&2
  exit 2
fi
nproc=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count())')}
if ! [[ $nproc =~ ^[1-9][0-9]*$ ]]; then
  echo "error: one process or more is needed, got $nproc (the GPUs of this host, or NPROC); set NPROC" >&2
  exit 2
fi
exec python -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
  -m megatron_magi train "$@"
