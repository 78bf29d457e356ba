# To be sourced.

# prune_into RUN RECIPE OPTIONS ...: a run in the directory RUN, with RUN.log beside it. One that was begun goes on.
prune_into() {
  local run=$1 resume=()
  if [ -d "$run" ]; then resume=(--resume); fi
  python3 -m paam prune "${@:2}" --out "$run" "${resume[@]}" >> "$run.log" 2>&1 || { echo "failed: see $run.log" >&2; return 1; }
}
export -f prune_into

# queue BASE DATA OUT WEIGHTS reads lines "NAME SETTINGS ..." and prunes by the recipe BASE with each of them, from those weights, five
# runs at a time.
queue() {
  local base=$1 data=$2 out=$3 weights=$4 name settings
  while read -r name settings; do
    echo "prune_into '$out/$name' '$base' --data '$data' --set model.weights='$weights' $settings"
  done | xargs -d '\n' -P 5 -I{} bash -c '{}'
}
