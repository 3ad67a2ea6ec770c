#!/usr/bin/env bash
# PCME++ ViT-B/16 on CC3M + CC12M + RedCaps with the hyperparameters of the paper (https://arxiv.org/abs/2305.18171).
#
#   DATA=/data LOGS=/runs launch/recipes/cc3m-cc12m-redcaps-b16.sh [flags, which override those below]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA:?the folder that holds cc3m, cc12m and redcaps}"

recipe=(
    --model PCMEpp-ViT-B-16
    --train-data "cc3m=$DATA/cc3m/*.tar::cc12m=$DATA/cc12m/*.tar::redcaps=$DATA/redcaps/*.tar"
    --dataset-type webdataset
    --workers 6
    --global-batch-size 1024        # the paper's, on any number of ranks
    --batch-size 128                # at most, per rank and forward pass: raise it where it fits
    --epochs 32
    --lr 5e-4 --wd 0.2 --beta1 0.9 --beta2 0.98 --eps 1e-6
    --warmup 10000                  # steps, five times CLIP's
    --train-means-by all --match-logit learned --init-match-scale 1 --init-match-shift 1 --init-logvar-bias -10
    --vib-weight 1e-6 --pp-weight 0 # drop the line above for the config's own: decoupled and tied
    --precision amp_bf16
    --save-every-minutes 15
    --report-to tensorboard
)
start_recipe "${recipe[@]}"
