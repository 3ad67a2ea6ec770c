# Sourced by coco.sh and flickr30k.sh: Karpathy's annotations and the images to shards with all captions, then counted.
# shellcheck shell=bash
#
# usage: NAME.sh [--dry-run] ANNOTATIONS IMAGES OUTPUT [--per-shard N]
#
# An interrupted call resumes: complete shards are kept.
#   PYTHON  of the environment that the package is installed in (default: python3)

# shellcheck source=launch/data/arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

make_shards() {
    local name run here rest
    read_arguments 3 'ANNOTATIONS IMAGES OUTPUT [--per-shard N]' "$@" || return
    "${run[@]}" "${PYTHON:-python3}" "$here/karpathy.py" "$name" "${rest[@]}"
    "${run[@]}" pcmepp data count "$name=${rest[2]}/train/*.tar"
}
