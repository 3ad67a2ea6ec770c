#!/usr/bin/env bash
# A run on several machines without a scheduler: start the same command on each of them, within ten minutes.
#
#   NNODES=2 HEAD=node1 launch/nodes.sh --model PCMEpp-ViT-B-32 --train-data '/data/cc3m/*.tar' --name first
#
#   NNODES   how many machines
#   HEAD     name or address of one of them, which all can reach; PORT (default 29400) must be free there
#   RUN_ID   distinguishes runs with the same head (default: pcmepp)
#   NPROC    ranks on this machine (default: one per GPU)
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${NNODES:?how many machines}" "${HEAD:?name or address of one of them, the same everywhere}"
start "${torchrun[@]}" --nnodes "$NNODES" --nproc-per-node "${NPROC:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:-pcmepp}" \
    "${module[@]}" "${flags[@]}"
