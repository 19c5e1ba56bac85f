#!/usr/bin/env bash
# Accelerate: Qwen3-8B
# 2 x 8 GPUs. Words after this script are handed on.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Less memory lost to fragmentation.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Run this on every node; job.sbatch does it under Slurm.
export PET_NODE_RANK="${NODE_RANK:?set NODE_RANK to 0 .. 1}"
export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"

# Your training script, and what it is told by the names of TrainingArguments; it cuts sequences to 4096 tokens.
SCRIPT_ARGS=(
  train.py
  --per_device_train_batch_size 1
  --gradient_accumulation_steps 16
  --optim adamw_torch_fused
)

exec accelerate launch --config_file "$HERE"/accelerate.yaml --machine_rank "$PET_NODE_RANK" --main_process_ip "$PET_MASTER_ADDR" "${SCRIPT_ARGS[@]}" "$@"
