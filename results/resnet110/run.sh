#!/usr/bin/env bash
# Our recipe on ResNet-110 with half of its epochs, at the ratio of the paper's medium row of Vanilla: run.sh DATA OUT
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
source "$(dirname "$0")/../queue.sh"
prune_into "$out/medium-seed0" cifar10-resnet56-strong-medium --data "$data" --set model.name=resnet110 --keep-macs 0.487 --keep-params 0.451 \
  --set schedule.warmup=80 --set schedule.finetune=110
