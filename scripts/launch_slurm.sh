#!/usr/bin/env bash
# Starts a recipe on several nodes under Slurm: one torchrun a node, one process on each GPU.
#   export MEGATRON=PATH DATA=PREFIX TOKENIZER=NAME SAVE=FOLDER        as for scripts/launch.sh
#   sbatch --nodes 4 scripts/launch_slurm.sh RECIPE [flags]            from this repository's folder
# Adapt the lines below, the environment and the port (PORT) to your cluster. The recipe, the data and
# SAVE must be on a disk that every node sees. MAGI_ROOT names this repository from another folder.
#SBATCH --job-name=megatron-magi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# With SAVE, a job that was preempted or lost a node starts again from its newest checkpoint. Fifteen
# minutes before its time is up it saves and ends: submit it again.
#SBATCH --requeue
#SBATCH --open-mode=append
#   adapt: --account, --partition, --constraint; --exclusive where nodes are shared by default.
set -euo pipefail

[ $# -gt 0 ] || {
  echo "error: a recipe is required, got none; sbatch scripts/launch_slurm.sh RECIPE [flags]" >&2
  exit 2
}
# adapt: how a shell on your nodes finds the Python with megatron_magi, for example
#   source /shared/venv/bin/activate
# adapt: NCCL_SOCKET_IFNAME=ib0 or the like, where the first network of a node is not the fast one.

recipe=$1
shift
ends=()
if [ -n "${SAVE:-}" ] && [ -n "${SLURM_JOB_END_TIME:-}" ]; then
  minutes=$(((SLURM_JOB_END_TIME - $(date +%s)) / 60 - 15))
  [ "$minutes" -lt 1 ] || ends=(--exit-duration-in-mins "$minutes")
fi
# sbatch runs a copy of this file, so the folder it was submitted from is the way back.
root=${MAGI_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}
exec bash "$root/scripts/launch.sh" "$recipe" ${ends[@]+"${ends[@]}"} "$@"
