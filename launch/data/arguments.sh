# Sourced by shards.sh and karpathy.sh: what their commands have in common.
# shellcheck shell=bash

# read_arguments COUNT USAGE NAME [--dry-run] ARGUMENT...
#
# Sets variables of the caller: `name`; `run`, which precedes each command and prints it in a dry run; `here`, the folder
# of these scripts; and `rest`, the arguments. Returns 2 and prints the usage if there are fewer than COUNT.
# shellcheck disable=SC2034
read_arguments() {
    local count=$1 usage=$2
    name=$3 run=()
    shift 3
    if [[ ${1:-} == --dry-run ]]; then
        run=(echo)
        shift
    fi
    if (($# < count)); then
        echo "usage: $name.sh [--dry-run] $usage" >&2
        return 2
    fi
    unset CDPATH # with it, cd would search other folders
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    rest=("$@")
}
