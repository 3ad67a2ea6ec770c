#!/usr/bin/env bash
# PCME++ ViT-B/32 on CC3M alone: a first real run, small enough for one node.
#
#   DATA=/data LOGS=/runs launch/recipes/cc3m-b32.sh [flags, which override those below]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA:?the folder that holds cc3m}"

recipe=(
    --model PCMEpp-ViT-B-32
    --train-data "cc3m=$DATA/cc3m/*.tar"
    --dataset-type webdataset
    --workers 6
    --global-batch-size 1024        # on any number of ranks
    --batch-size 128                # at most, per rank and forward pass: raise it where it fits
    --epochs 32
    --lr 5e-4 --wd 0.2 --beta1 0.9 --beta2 0.98 --eps 1e-6
    --warmup 2000                   # steps
    --precision amp_bf16
    --save-every-minutes 15
    --report-to tensorboard
)
start_recipe "${recipe[@]}"
