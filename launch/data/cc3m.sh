#!/usr/bin/env bash
# Shards of CC3M from Train_GCC-training.tsv (caption, URL) of https://ai.google.com/research/ConceptualCaptions.
#
#   cc3m.sh Train_GCC-training.tsv /data/cc3m        # an interrupted call resumes; see shards.sh for the settings
#   cc3m.sh Train_GCC-training.tsv /data/cc3m --number_sample_per_shard 1000
set -euo pipefail
# shellcheck source=launch/data/shards.sh
source "$(dirname "${BASH_SOURCE[0]}")/shards.sh"
make_shards cc3m "$@"
