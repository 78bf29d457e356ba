#!/usr/bin/env bash
# What each lever of our recipe's training brings, five runs at a time: run.sh DATA OUT
# First a dense network without the held-out tenth, 60 epochs; then one setting changed at a time. The rule: the best of them joins the
# recipe if it gains 0.4 points over "as-it-is".
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
base=$(dirname "$0")/base.toml
source "$(dirname "$0")/../queue.sh"
dense_without_a_tenth "$data" "$out"
queue "$base" "$data" "$out" "$out/dense/dense.safetensors" <<RUNS
as-it-is
no-teacher --set distill.weight=0
no-cutout --set data.cutout=0
mixup --set data.mixup=0.2
trivial --set data.trivial=true
average-0.999 --set finetune.average=0.999
cycles-6 --set schedule.cycles=6 --set schedule.score=1 --set schedule.weight=1
decay-2e-4 --set finetune.weight_decay=2e-4
floor-0.125 --set target.floor=0.125
RUNS
