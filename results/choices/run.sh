#!/usr/bin/env bash
# Choices for the strong recipe, five runs at a time: run.sh DATA OUT
# First a dense network without the held-out tenth, 60 epochs; then one setting changed at a time.
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
base=$(dirname "$0")/base.toml
source "$(dirname "$0")/../queue.sh"
dense_without_a_tenth "$data" "$out"
medium="--keep-macs 0.507 --keep-params 0.477"
even="--set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=12 --set target.uniform=true --set target.floor=0.0"
queue "$base" "$data" "$out" "$out/dense/dense.safetensors" <<RUNS
high-area
high-macs --set prune.balance=macs
high-rate-0.05 --set finetune.lr=0.05
high-taught-0.9 --set distill.weight=0.9
high-l1-even $even --set prune.method=l1
medium-none $medium --set prune.balance=none
medium-macs $medium --set prune.balance=macs
medium-side $medium --set prune.balance=side
RUNS
