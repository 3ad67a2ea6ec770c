#!/usr/bin/env bash
# A run on this machine: one rank per GPU, or NPROC ranks. Takes the flags of `pcmepp train`.
#
#   launch/local.sh --model PCMEpp-ViT-B-32 --train-data '/data/cc3m/*.tar' --name first
#   NPROC=2 launch/local.sh --model PCMEpp-tiny --dataset-type synthetic --train-num-samples 64 --epochs 1 --device cpu
#
# Exit codes: 0 done, 2 a mistake in the flags or the data, 75 saved on request; anything else is a crash.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

start "${torchrun_with_code[@]}" --standalone --nproc-per-node "${NPROC:-gpu}" "${module[@]}" "${flags[@]}"
