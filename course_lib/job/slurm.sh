#!/bin/bash
# Train on several nodes under SLURM: sbatch train.sh --strategy zero2 --out /shared/run
# Write this file with: python -m course_lib.train --slurm > train.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# The first node of the job is where the ranks meet. Jobs that share a node need ports of their own.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# One torchrun a node, which starts one rank a GPU, or one rank where there is none. When a rank fails, all of them start
# again, and go on from the newest checkpoint in --out; so does the job when SLURM requeues it. --out must be a folder
# that all nodes see.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=3 \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" \
  -m course_lib.train "$@"
