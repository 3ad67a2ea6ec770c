#!/usr/bin/env bash
# Shards of COCO captions in Karpathy's splits from dataset_coco.json of https://cs.stanford.edu/people/karpathy/deepimagesent
# and the images of 2014 (https://cocodataset.org): train2014.zip and val2014.zip in a folder, unpacked or not.
#
#   coco.sh dataset_coco.json COCO /data/coco        # an interrupted call resumes; see karpathy.py for the layout
set -euo pipefail
# shellcheck source=launch/data/karpathy.sh
source "$(dirname "${BASH_SOURCE[0]}")/karpathy.sh"
make_shards coco "$@"
