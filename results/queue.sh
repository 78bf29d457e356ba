# To be sourced: queue BASE DATA OUT WEIGHTS reads lines "NAME SETTINGS ..." and prunes by the recipe BASE with each of them,
# from those weights, five runs at a time.
queue() {
  local base=$1 data=$2 out=$3 weights=$4 name settings
  while read -r name settings; do
    echo "python3 -m paam prune '$base' --data '$data' --out '$out/$name' --set model.weights='$weights' $settings > '$out/$name.log' 2>&1"
  done | xargs -d '\n' -P 5 -I{} bash -c '{}'
}
