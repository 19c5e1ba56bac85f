#!/usr/bin/env bash
# DeepSpeed: Mixtral-8x7B
# 2 x 8 GPUs. Words after this script are handed on.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Less memory lost to fragmentation.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Run this on every node; job.sbatch does it under Slurm.
export PET_NODE_RANK="${NODE_RANK:?set NODE_RANK to 0 .. 1}"
export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"

# What the training script, which is yours, has to be told.
SCRIPT_ARGS=(
  --deepspeed "$HERE"/ds_config.json
  --max_seq_length 4096
)

exec torchrun --nnodes=2 --nproc-per-node=8 --master-port=29500 train.py "${SCRIPT_ARGS[@]}" "$@"
