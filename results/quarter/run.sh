#!/usr/bin/env bash
# Does it pay? ResNet-56 at a quarter of the MACs (and at most 0.3 of the parameters), by the short protocol: run.sh DATA OUT [SEEDS]
#
# One dense network per seed, 160 epochs, rounded to half precision so that it can be kept; every arm begins with it. Then 100 epochs of
# fine-tune for all, no teacher. What an arm trains beyond that stands in its schedule: 20 epochs of alternation for those that learn
# scores, one epoch inside the gated network for the others, which the engine wants before it cuts. l1-long has the 20 epochs as well;
# scratch, which has no dense network, has 260.
# Three runs at a time: on one GPU that wants NVIDIA's MPS. What was begun goes on. Runs whose records lie beside this script are not
# made again, and its dense networks are taken: copy OUT's finished runs here, their records compressed, before the next part.
set -euo pipefail
data=$1 out=$2 seeds=${3:-0 1 2}
mkdir -p "$out"
here=$(realpath "$(dirname "$0")")
source "$here/../queue.sh"
python3 "$here/full_streams.py" "$out/full-streams.json"

# jobs ARM SETTINGS ...: one line for xargs per seed.
jobs_of() {
  local arm=$1 seed; shift
  for seed in $seeds; do
    echo "run_arm $arm $seed ${*//SEED/$seed}"
  done
}
run_arm() {
  [ -f "$here/$1-seed$2/record.jsonl.gz" ] && return
  prune_into "$out/$1-seed$2" cifar10-resnet56-strong-high --data "$data" --seed "$2" --set distill.weight=0 --set schedule.finetune=100 "${@:3}"
}
dense_network() {  # dense_network SEED
  [ -f "$here/dense-seed$1.safetensors" ] && cp "$here/dense-seed$1.safetensors" "$out"
  [ -f "$out/dense-seed$1.safetensors" ] && return
  run_arm dense "$1" --keep-macs 1 --set prune.method=random --set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=1 \
    --set schedule.finetune=0
  python3 - "$out/dense-seed$1" <<'PY'
import sys
from safetensors.torch import load_file, save_file
weights = load_file(f"{sys.argv[1]}/dense.safetensors")
save_file({name: value.half() if value.is_floating_point() else value for name, value in weights.items()}, f"{sys.argv[1]}.safetensors")
PY
}
export -f run_arm dense_network
export data out here
for seed in $seeds; do  # the widths of arms that are not made again
  [ -d "$here/kq-seed$seed" ] && mkdir -p "$out/kq-seed$seed" && cp "$here/kq-seed$seed/plan.json" "$out/kq-seed$seed/"
done

printf '%s\n' $seeds | xargs -P 3 -I{} bash -c 'dense_network {}'
begun="--set schedule.warmup=0 --set model.weights=$out/dense-seedSEED.safetensors"
fixed="--set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=1 --set target.floor=0.0"
widths="--set schedule.score=0 --set schedule.cycles=1 --set schedule.weight=1 --set target.widths"
{
  jobs_of kq "$begun"
  jobs_of l1 "$begun $fixed --set prune.method=l1 --set target.uniform=true"
  jobs_of inner-l1 "$begun $widths=$out/full-streams.json --set prune.method=l1"
  jobs_of inner-random "$begun $widths=$out/full-streams.json --set prune.method=random"
  jobs_of free "$begun --set prune.method=free"
  jobs_of kq-widths "$begun $widths=$out/kq-seedSEED/plan.json --set prune.method=random"
  jobs_of l1-long "$begun $fixed --set prune.method=l1 --set target.uniform=true --set schedule.finetune=120"
  jobs_of scratch "$fixed --set prune.method=random --set target.uniform=true --set schedule.warmup=0 --set schedule.finetune=260"
} | xargs -d '\n' -P 3 -I{} bash -c '{}'
