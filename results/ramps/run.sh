#!/usr/bin/env bash
# What the ramp of the rate does to dense networks: 15 epochs with and without, three seeds, on a held-out tenth: run.sh DATA OUT
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"
source "$(dirname "$0")/../queue.sh"
short="--set data.holdout=0.1 --set schedule.warmup=15 --set schedule.cycles=1 --set schedule.score=1 --set schedule.weight=1 --set schedule.finetune=0"
for seed in 0 1 2; do
  for ramp in 0 5; do
    echo "prune_into '$out/ramp-$ramp-seed$seed' cifar10-resnet56-strong --data '$data' --seed $seed $short --set warmup.ramp=$ramp"
  done
done | xargs -d '\n' -P 5 -I{} bash -c '{}'
