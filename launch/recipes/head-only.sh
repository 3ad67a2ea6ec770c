#!/usr/bin/env bash
# The log-variance branch alone on CC3M, on top of a frozen ViT-B/32 of OpenCLIP's. The towers are computed once: their
# output, about 280 GB, is kept in CACHE, and every epoch reads it from there.
#
#   DATA=/data LOGS=/runs CACHE=/scratch/tokens launch/recipes/head-only.sh [flags, which override those below]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA:?the folder that holds cc3m}"

recipe=(
    --model PCMEpp-ViT-B-32 --pretrained laion2b_s34b_b79k
    --train-data "cc3m=$DATA/cc3m/*.tar"
    --dataset-type webdataset
    --head-only
    --init-logvar-bias -8           # the pretrained scale of 100 asks for smaller variances than a fresh one
    --cache-tokens "${CACHE:-$DATA/cc3m-tokens-b32}"
    --workers 6
    --global-batch-size 4096        # on any number of ranks
    --batch-size 512                # at most, per rank and forward pass: raise it where it fits
    --epochs 8
    --lr 5e-4 --wd 0.2 --beta1 0.9 --beta2 0.98 --eps 1e-6
    --warmup 200                    # steps
    --precision amp_bf16
    --save-every-minutes 15
    --report-to tensorboard
)
start_recipe "${recipe[@]}"
