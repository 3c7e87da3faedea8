#!/bin/bash
# A cluster in a Slurm job: `sbatch slurm.sh`. Written from the documentation of Ray and Slurm; it was not run.
#
# `ray symmetric-run` starts Ray on all nodes, runs the command on the first, and stops Ray afterwards. $HOME is shared
# by all nodes. `scontrol requeue` is a restart: the journal takes up.
#SBATCH --job-name=tinsmith
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_TOKEN
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=5

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Clients need a key, because other machines can reach the port: tinsmith keys create NAME --data "$HOME/tinsmith".
srun --export=ALL ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --object-store-memory 200000000 -- \
    tinsmith serve --cluster auto --data "$HOME/tinsmith" --host 0.0.0.0 \
    --model Qwen/Qwen3-8B --trainers 8 --samplers 24
