#!/usr/bin/env bash
# Megatron-LM: Llama-3.1-70B
# 8 x 8 GPUs. Words after this script are handed on.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Transformer Engine may pick its fastest kernels.
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=1
# Kernels start in the order of their launch, so that collectives of tensor and context parallelism overlap; Megatron refuses to start without it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Less memory lost to fragmentation.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Run this on every node; job.sbatch does it under Slurm.
export PET_NODE_RANK="${NODE_RANK:?set NODE_RANK to 0 .. 7}"
export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"

# The network.
MODEL_ARGS=(
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --position-embedding-type rope
  --max-position-embeddings 131072
  --rotary-base 500000
  --use-rope-scaling
  --rope-scaling-factor 8.0
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
)

# How a step is spread over the GPUs; data parallelism is what the rest leaves.
PARALLEL_ARGS=(
  --tensor-model-parallel-size 8
  --pipeline-model-parallel-size 4
  --sequence-parallel
  --decoder-first-pipeline-num-layers 19
  --decoder-last-pipeline-num-layers 19
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
)

# 32 micro-batches per step and pipeline.
BATCH_ARGS=(
  --seq-length 4096
  --micro-batch-size 1
  --global-batch-size 64
  --train-iters 100
  --log-interval 1
  --log-throughput
  --eval-iters 0
)

# Number formats, recomputation, offload.
MEMORY_ARGS=(
  --bf16
  --attention-backend auto
  --cross-entropy-loss-fusion
)

# Rates are placeholders; the planner knows of their memory only.
OPTIMIZER_ARGS=(
  --optimizer adam
  --weight-decay 0.1
  --lr 3e-4
  --min-lr 3e-5
  --clip-grad 1.0
  --attention-dropout 0
  --hidden-dropout 0
)

# Random tokens of the model's vocabulary; put your data and tokenizer here.
DATA_ARGS=(
  --mock-data
  --tokenizer-type NullTokenizer
  --vocab-size 128255
  --padded-vocab-size 129024
)

exec torchrun --nnodes=8 --nproc-per-node=8 --master-port=29500 pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${BATCH_ARGS[@]}" "${MEMORY_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${DATA_ARGS[@]}" "$@"
