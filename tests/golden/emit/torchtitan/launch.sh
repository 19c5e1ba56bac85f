#!/usr/bin/env bash
# torchtitan 0.2: Llama-3.1-8B
# 2 x 8 GPUs. Words after this script are handed on.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Less memory lost to fragmentation; torchtitan's own launcher sets it.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Run this on every node; job.sbatch does it under Slurm.
export PET_NODE_RANK="${NODE_RANK:?set NODE_RANK to 0 .. 1}"
export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"

# Model, sharding and schedule are in the TOML; dataset and tokenizer are yours to set.
CONFIG_ARGS=(
  --job.config_file "$HERE"/torchtitan.toml
)

exec torchrun --nnodes=2 --nproc-per-node=8 --master-port=29500 -m torchtitan.train "${CONFIG_ARGS[@]}" "$@"
