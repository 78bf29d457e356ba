#!/usr/bin/env bash
# One setting changed at a time, five runs at a time: run.sh DATA OUT DENSE (weights of a dense ResNet-56, safetensors)
# Thresholds as in the paper, by lambda alone; everything else at half of the MACs, so that accuracies compare.
set -euo pipefail
data=$1 out=$2 dense=$3
mkdir -p "$out"
base=$(dirname "$0")/base.toml
source "$(dirname "$0")/../queue.sh"
half="--keep-macs 0.5"
queue "$base" "$data" "$out" "$dense" <<RUNS
theta-0.2 --threshold 0.2
theta-0.3 --threshold 0.3
theta-0.4 --threshold 0.4
theta-0.5 --threshold 0.5
theta-0.6 --threshold 0.6
theta-0.7 --threshold 0.7
activation-leaky-exponential $half
activation-leaky-2sigmoid $half --set prune.activation=leaky-2sigmoid
activation-sharp-sigmoid $half --set prune.activation=sharp-sigmoid
activation-sigmoid $half --set prune.activation=sigmoid
placement-branch $half --set prune.placement=branch
streams-tied $half --set prune.streams=tied
balance-side $half --set prune.balance=side
balance-none $half --set prune.balance=none
balance-macs $half --set prune.balance=macs
balance-macs-tied $half --set prune.balance=macs --set prune.streams=tied
scorer-vanilla $half --set prune.scorer=vanilla
scorer-free $half --set prune.method=free
widths-uniform $half --set prune.streams=tied --set target.uniform=true
widths-uniform-l1 $half --set prune.streams=tied --set target.uniform=true --set prune.method=l1 --set schedule.score=0 --set schedule.weight=4
RUNS
