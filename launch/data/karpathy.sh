# Sourced by coco.sh and flickr30k.sh: Karpathy's annotations and the images to shards with all captions, then counted.
# shellcheck shell=bash
#
# usage: NAME.sh [--dry-run] ANNOTATIONS IMAGES OUTPUT [--per-shard N]
#
# An interrupted call resumes: complete shards are kept.
#   PYTHON  of the environment that the package is installed in (default: python3)

make_shards() {
    local name=$1
    shift
    local run=()
    if [[ ${1:-} == --dry-run ]]; then
        run=(echo)
        shift
    fi
    if (($# < 3)); then
        echo "usage: $name.sh [--dry-run] ANNOTATIONS IMAGES OUTPUT [--per-shard N]" >&2
        return 2
    fi
    local here output=$3
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    "${run[@]}" "${PYTHON:-python3}" "$here/karpathy.py" "$name" "$@"
    "${run[@]}" pcmepp data count "$name=$output/train/*.tar"
}
