#!/usr/bin/env bash
# The paper's recipe, read literally: both scorers at both ratios, four runs at a time: run.sh DATA OUT
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
runs=()
for name in kq-medium kq-high vanilla-medium vanilla-high; do
  python3 -m paam prune cifar10-resnet56-$name --data "$data" --out "$out/$name-seed0" > "$out/$name-seed0.log" 2>&1 &
  runs+=($!)
done
for run in "${runs[@]}"; do wait "$run"; done
