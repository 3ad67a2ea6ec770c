#!/usr/bin/env bash
# Shards of Flickr30k in Karpathy's splits from dataset_flickr30k.json of
# https://cs.stanford.edu/people/karpathy/deepimagesent and the folder flickr30k-images, or a .zip of it.
#
#   flickr30k.sh dataset_flickr30k.json flickr30k-images /data/flickr30k        # an interrupted call resumes
set -euo pipefail
# shellcheck source=launch/data/karpathy.sh
source "$(dirname "${BASH_SOURCE[0]}")/karpathy.sh"
make_shards flickr30k "$@"
