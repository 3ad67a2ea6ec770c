#!/usr/bin/env bash
# Shards of CC12M from cc12m.tsv (URL, caption) of https://github.com/google-research-datasets/conceptual-12m.
#
#   cc12m.sh cc12m.tsv /data/cc12m        # an interrupted call resumes; see shards.sh for the settings
#   cc12m.sh cc12m.tsv /data/cc12m --number_sample_per_shard 1000
set -euo pipefail
# shellcheck source=launch/data/shards.sh
source "$(dirname "${BASH_SOURCE[0]}")/shards.sh"
make_shards cc12m "$@"
