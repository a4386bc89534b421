#!/usr/bin/env bash
# Trains a recipe on several nodes under Slurm: one torchrun a node, a process on each GPU.
#   sbatch --nodes 4 scripts/train_slurm.sh RECIPE [section.key=value ...]
# Adapt to your cluster: the lines below, the environment, the port. Recipe, data and log.dir must
# be on a disk that every node sees.
#SBATCH --job-name=megatron-magi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# A job that was preempted or lost a node starts again as it is, and checkpoint.load=auto below goes
# on from the newest checkpoint. Five minutes before its time is up it saves and ends: submit again.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
#   adapt: --account, --partition, --constraint; --exclusive where nodes are shared by default.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "error: a recipe is needed, got none; sbatch scripts/train_slurm.sh RECIPE [section.key=value ...]" >&2
  exit 2
fi
# adapt: how a shell on your nodes finds the Python with megatron_magi, for example
#   source /shared/venv/bin/activate

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # not into `head`: pipefail would see SIGPIPE
head_node=${nodes%%$'\n'*}
port=29500 # adapt: any port that the nodes may open to each other

# adapt: NCCL_SOCKET_IFNAME=ib0 or the like, where the nodes' first network is not the fast one.
# srun does not take over sbatch's --cpus-per-task. Overrides of yours win over the two below.
exec srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  python -m torch.distributed.run \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:?each node needs GPUs}" \
  --rdzv-backend c10d --rdzv-endpoint "$head_node:$port" --rdzv-id "$SLURM_JOB_ID" \
  -m megatron_magi train "$1" checkpoint.load=auto checkpoint.interval=500 "${@:2}"
