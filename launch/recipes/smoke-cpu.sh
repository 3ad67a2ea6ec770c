#!/usr/bin/env bash
# A few steps of a tiny model on synthetic images, two CPU ranks per node: does everything start, communicate and save?
#
#   launch/recipes/smoke-cpu.sh [flags, which override those below]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
export NPROC=${NPROC:-2}

recipe=(
    --model PCMEpp-tiny
    --dataset-type synthetic --train-num-samples 64
    --workers 0
    --batch-size 8
    --epochs 1
    --warmup 1
    --device cpu --precision fp32
    --log-every-n-steps 1
)
start_recipe "${recipe[@]}"
