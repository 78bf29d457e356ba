#!/usr/bin/env bash
# The paper's recipe, read literally: both scorers at both ratios, a few runs at a time on a GPU: run.sh DATA OUT
# The records here leave out "cifar10-resnet56-" of the directories' names.
set -euo pipefail
exec python3 -m paam sweep cifar10-resnet56-{kq,vanilla}-{medium,high} --data "$1" --out "$2"
