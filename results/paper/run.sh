#!/usr/bin/env bash
# The paper's recipe, read literally: both scorers at both ratios, four runs at a time: run.sh DATA OUT
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
source "$(dirname "$0")/../queue.sh"
runs=()
for name in kq-medium kq-high vanilla-medium vanilla-high; do
  prune_into "$out/$name-seed0" cifar10-resnet56-$name --data "$data" &
  runs+=($!)
done
for run in "${runs[@]}"; do wait "$run"; done
