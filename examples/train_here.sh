#!/usr/bin/env bash
# From nothing to a trained model on this machine's CPUs, in under a minute: find the fastest
# layout of a small model on two processes, make it runnable, train it on Python's own sources.
#
#   bash examples/train_here.sh [FOLDER]
set -euo pipefail

folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"

planner search --model tiny --hardware cpu-gloo --gpus 2 --precision fp32 \
  --seq-len 128 --global-batch-size 16 -o "$folder/plan.json"
planner apply "$folder/plan.json" -o "$folder/run"
bash "$folder/run/launch.sh" --steps 20 --learning-rate 3e-3
echo "read $folder/run/train.py, plot with: planner plot $folder/run -o run.svg"
