# To be sourced.

# prune_into RUN RECIPE OPTIONS ...: a run in the directory RUN, with RUN.log beside it. One that was begun goes on.
prune_into() {
  local run=$1 resume=()
  if [ -d "$run" ]; then resume=(--resume); fi
  python3 -m paam prune "${@:2}" --out "$run" "${resume[@]}" >> "$run.log" 2>&1 || { echo "failed: see $run.log" >&2; return 1; }
}
export -f prune_into

# dense_without_a_tenth DATA OUT: 60 epochs of a dense ResNet-56 that has not seen the held-out tenth, to begin with.
dense_without_a_tenth() {
  prune_into "$2/dense" cifar10-resnet56-strong --data "$1" --set data.holdout=0.1 --set schedule.warmup=60 \
    --set schedule.cycles=1 --set schedule.score=1 --set schedule.weight=1 --set schedule.finetune=1
}

# queue BASE DATA OUT WEIGHTS reads lines "NAME SETTINGS ..." and prunes by the recipe BASE with each of them, from those weights, five
# runs at a time.
queue() {
  local base=$1 data=$2 out=$3 weights=$4 name settings
  while read -r name settings; do
    echo "prune_into '$out/$name' '$base' --data '$data' --set model.weights='$weights' $settings"
  done | xargs -d '\n' -P 5 -I{} bash -c '{}'
}
