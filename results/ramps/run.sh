#!/usr/bin/env bash
# What the ramp of the rate does to dense networks: 15 epochs with and without, three seeds, on a held-out tenth: run.sh DATA OUT
# The records here are named after the ramp alone: ramp-5-seed0.
set -euo pipefail
exec python3 -m paam sweep cifar10-resnet56-strong --vary warmup.ramp=0,5 --seeds 0,1,2 --data "$1" --out "$2" \
  --set data.holdout=0.1 --set schedule.warmup=15 --set schedule.cycles=1 --set schedule.score=1 --set schedule.weight=1 \
  --set schedule.finetune=0
