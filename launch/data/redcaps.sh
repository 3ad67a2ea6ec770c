#!/usr/bin/env bash
# Shards of RedCaps from the folder of its annotations (one JSON a subreddit and year) of https://redcaps.xyz.
#
#   redcaps.sh annotations /data/redcaps        # an interrupted call resumes; see shards.sh for the settings
#   redcaps.sh annotations /data/redcaps --number_sample_per_shard 1000
set -euo pipefail
# shellcheck source=launch/data/shards.sh
source "$(dirname "${BASH_SOURCE[0]}")/shards.sh"
make_shards redcaps "$@"
