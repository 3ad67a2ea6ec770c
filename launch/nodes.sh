#!/usr/bin/env bash
# A run on several machines without a scheduler: start the same command on each of them, within JOIN_SECONDS.
#
#   NNODES=2 HEAD=node1 launch/nodes.sh --model PCMEpp-ViT-B-32 --train-data '/data/cc3m/*.tar' --name first
#
#   NNODES         how many machines
#   HEAD           name or address of one of them, which all can reach; PORT (default 29400) must be free there
#   RUN_ID         distinguishes runs with the same head (default: pcmepp)
#   NPROC          ranks on this machine (default: one per GPU)
#   JOIN_SECONDS   how long to wait for the others (default: 600)
#
# Exit codes: 0 done, 2 a mistake in the flags or the data, 75 saved on request; anything else is a crash.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

: "${NNODES:?how many machines}" "${HEAD:?name or address of one of them, the same everywhere}"
wait=${JOIN_SECONDS:-600}
start "${torchrun_with_code[@]}" --nnodes "$NNODES" --nproc-per-node "${NPROC:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:-pcmepp}" \
    --rdzv-conf "join_timeout=$wait,read_timeout=$wait" \
    "${module[@]}" "${flags[@]}"
