#!/usr/bin/env bash
# The short-schedule comparison on one GPU: three scorers, one budget, one recipe, run side by side under MPS.
#   results/short/run.sh DATA_DIR SEED
# Warm-up 15, 4 cycles of 2 + 4, fine-tune 60: 99 epochs instead of the paper's 440. The free run also trains the dense control.
set -euo pipefail
data=$1 seed=$2
common=(--data "$data" --keep-macs 0.5 --seed "$seed" --device cuda 
        --set schedule.warmup=15 --set schedule.cycles=4 --set schedule.score=2 --set schedule.weight=4
        --set schedule.finetune=60 --set train.compile=false)
mkdir -p runs
nvidia-cuda-mps-control -d || true
for scorer in kq vanilla free; do
  extra=()
  [ "$scorer" = free ] && extra=(--set prune.method=free --set score.lr=1e-2 --set schedule.control=true)
  recipe=cifar10-resnet56-$([ "$scorer" = vanilla ] && echo vanilla || echo kq)
  python3 -m paam prune "$recipe" "${common[@]}" "${extra[@]}" --out "runs/short-$scorer-seed$seed" \
    > "runs/short-$scorer-seed$seed.log" 2>&1 &
done
wait
