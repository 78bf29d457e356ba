#!/usr/bin/env bash
# The strong recipe at both ratios and its controls, for one seed: run.sh DATA OUT SEED
# Each ratio trains its dense network; its controls begin with it, or are taught by it, and have as many epochs behind them.
# Four runs at a time: on one GPU that wants NVIDIA's MPS.
set -euo pipefail
data=$1 out=$2 seed=$3
mkdir -p "$out"
recipe=cifar10-resnet56-strong
dense=$out/medium-seed$seed/dense.safetensors
began="--set schedule.warmup=0 --set model.weights=$dense"
even="--set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=20 --set target.uniform=true --set target.floor=0.0"
source "$(dirname "$0")/../queue.sh"
prune() {
  prune_into "$out/$2-seed$seed" "$1" --data "$data" --seed "$seed" "${@:3}"
}

trap 'for job in $(jobs -p); do pkill -P "$job" || true; done' EXIT  # if one fails, the others are told to save and stop

prune $recipe-medium medium &
first=$!
prune $recipe-high high &
second=$!
while [ ! -f "$dense" ]; do
  kill -0 $first 2> /dev/null || { wait $first; exit 1; }
  sleep 2
done
prune $recipe-medium scratch --set schedule.warmup=0 --set schedule.finetune=380 --set distill.teacher="$dense" $even --set prune.method=random &
third=$!
prune $recipe-medium l1 $began $even --set prune.method=l1
prune $recipe-medium free $began --set prune.method=free
prune $recipe-medium dense $began --keep-macs 1 --keep-params 1 --set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=20 \
  --set prune.method=random
for run in $first $second $third; do wait "$run"; done
prune $recipe-medium widths $began --set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=20 \
  --set prune.method=random --set target.widths="$out/medium-seed$seed/plan.json"
prune $recipe-high high-400 $began --set schedule.finetune=220
prune $recipe-high high-l1 $even --set prune.method=l1 --set schedule.warmup=0 \
  --set model.weights="$out/high-seed$seed/dense.safetensors"
