#!/usr/bin/env bash
# The proxies, five at a time on one GPU: run.sh DATA OUT CHECKPOINT (the public ResNet-56 weights, safetensors).
set -euo pipefail
data=$1 out=$2 weights=$3
mkdir -p "$out"
base=$(dirname "$0")/base.toml
source "$(dirname "$0")/../queue.sh"
fixed="--set schedule.score=0 --set target.uniform=true --set prune.streams=tied"
queue "$base" "$data" "$out" "$weights" <<RUNS
kq-side
kq-none --set prune.balance=none
kq-area --set prune.balance=area
vanilla-side --set prune.scorer=vanilla
free-side --set prune.method=free
kq-side-nofloor --set target.floor=0.0
kq-side-tied --set prune.streams=tied
random-uniform --set prune.method=random $fixed
l1-uniform --set prune.method=l1 $fixed
kq-side-branch --set prune.placement=branch
RUNS
