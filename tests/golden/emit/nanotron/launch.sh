#!/usr/bin/env bash
# nanotron: Llama-2-7B
# 2 x 8 GPUs. Words after this script are handed on.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Kernels start in the order of their launch; nanotron asserts it for tensor parallelism that overlaps.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Run this on every node; job.sbatch does it under Slurm.
export PET_NODE_RANK="${NODE_RANK:?set NODE_RANK to 0 .. 1}"
export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"

# Everything is in the YAML; without a dataset, nanotron makes up tokens.
CONFIG_ARGS=(
  --config-file "$HERE"/nanotron.yaml
)

exec torchrun --nnodes=2 --nproc-per-node=8 --master-port=29500 run_train.py "${CONFIG_ARGS[@]}" "$@"
