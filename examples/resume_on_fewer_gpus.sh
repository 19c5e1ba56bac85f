#!/usr/bin/env bash
# Half of the GPUs are taken away. Plan for those that are left, and go on where the run stopped: a
# checkpoint belongs to the model, not to the plan that wrote it. Here four processes become two.
#
#   bash examples/resume_on_fewer_gpus.sh [FOLDER]
set -euo pipefail

folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
job=(--model tiny --hardware cpu-gloo --precision fp32 --seq-len 128 --global-batch-size 16)
training=(--steps 60 --learning-rate 3e-3 --save-every 10)

planner search "${job[@]}" --gpus 4 -o "$folder/four.json"
planner apply "$folder/four.json" -o "$folder/four"
# If a rank dies, torchrun starts all of them again, up to three times, and they go on from the last
# checkpoint by themselves. SIGTERM, which schedulers send before they take machines away, makes the
# run save and leave.
PET_MAX_RESTARTS=3 bash "$folder/four/launch.sh" "${training[@]}" &
launcher=$!
until [[ -d "$folder/four/checkpoints/step-00000010" ]]; do
  kill -0 "$launcher"
  sleep 1
done
kill -TERM "$launcher"
wait "$launcher" || echo "stopped"

planner search "${job[@]}" --gpus 2 -o "$folder/two.json"
planner apply "$folder/two.json" -o "$folder/two"
last="$folder/four/checkpoints/$(cat "$folder/four/checkpoints/latest")"
bash "$folder/two/launch.sh" "${training[@]}" --resume "$last"

# The trained model as a folder that Hugging Face's from_pretrained reads.
python -m runtime.weights.export "$folder/two/checkpoints/step-00000060" -o "$folder/model"
