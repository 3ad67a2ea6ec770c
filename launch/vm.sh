#!/usr/bin/env bash
# A run on one cloud machine that may be preempted: it is watched until it is done, as launch/slurm.sbatch does.
#
#   launch/vm.sh --model PCMEpp-ViT-B-32 --train-data '/data/cc3m/*.tar' --logs /disk/runs --name first
#
# When the provider announces the end of the machine, or at SIGTERM, the run saves and exits; the same command resumes
# it, on this machine or on another one with the same disk. After a crash it starts again if it has made progress.
# Exit codes: 0 done, 75 saved and to be resumed by the same command, anything else failed.
#
#   NPROC          ranks (default: one per GPU)
#   MAX_RESTARTS   how often a crashed run may be started again (default: 200)
#   CLOUD          whose notice to watch for: aws, gcp, azure or none (default: by the maker of the machine)
#   METADATA       address of the machine's metadata server (default: http://169.254.169.254, as in all three)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.sh
source "$here/common.sh"
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
if [[ $dry_run ]]; then exec "$launch_dir/local.sh" "$@"; fi

METADATA=${METADATA:-http://169.254.169.254}
if [[ ! $METADATA =~ ^https?:// ]]; then
    printf 'METADATA=%q: give an address that starts with http://.\n' "$METADATA" >&2
    exit 2
fi
restarts=${VM_RESTARTS:-0} # counted by this script, which starts itself again
who="start $restarts: "

# provider: whose machine this is, as its firmware says
provider() {
    case $(cat /sys/class/dmi/id/{sys_vendor,product_name} 2>/dev/null || true) in
    *Amazon*) echo aws ;;
    *Google*) echo gcp ;;
    *Microsoft*) echo azure ;;
    *) echo none ;;
    esac
}

# ask_metadata PATH OPTIONS...: what the metadata server says; nothing if it fails
ask_metadata() {
    local path=$1
    shift
    curl --silent --fail --noproxy '*' --max-time 5 "$@" "$METADATA$path" || true
}

# announced: whether the machine is about to be taken away
announced() {
    local token
    case $CLOUD in
    aws)
        token=$(ask_metadata /latest/api/token -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60')
        # 404 until there is a notice, two minutes before the end
        [[ $(ask_metadata /latest/meta-data/spot/instance-action -H "X-aws-ec2-metadata-token: $token") == *action* ]]
        ;;
    gcp) # 30 seconds before the end
        [[ $(ask_metadata /computeMetadata/v1/instance/preempted -H 'Metadata-Flavor: Google') == TRUE ]]
        ;;
    azure) # at least 30 seconds before the end
        [[ $(ask_metadata '/metadata/scheduledevents?api-version=2020-07-01' -H 'Metadata: true') =~ \"(Preempt|Terminate)\" ]]
        ;;
    esac
}

# watch_for_notice: send USR2 to this script when the provider announces the end
watch_for_notice() {
    until announced; do sleep 1; done
    kill -USR2 $$
}

CLOUD=${CLOUD:-$(provider)}
case $CLOUD in
aws | gcp | azure | none) ;;
*)
    echo "CLOUD=$CLOUD: there are aws, gcp, azure and none." >&2
    exit 2
    ;;
esac
if [[ $CLOUD != none ]] && ! command -v curl >/dev/null; then
    echo "There is no curl to ask the metadata server with: install it, or set CLOUD=none." >&2
    exit 2
fi
find_run pcmepp
claim_run "${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}"

notice=
trap 'notice=1; ask "the machine is about to be preempted"' USR2
# After the notice, the operating system's own request while it shuts down does not cut the saving short.
trap '[[ $notice ]] || ask TERM' TERM
trap '[[ $notice ]] || ask INT' INT
watcher=
if [[ $CLOUD != none ]]; then
    watch_for_notice &
    watcher=$!
fi
say "run folder $run, preemption notice: $CLOUD"
run_command "$launch_dir/local.sh" "${flags[@]}"
if [[ $watcher ]]; then kill "$watcher" 2>/dev/null || true; fi

if [[ -e $run/done ]]; then
    say "done"
    exit 0
fi
if [[ -e $run/stopped ]]; then
    say "stopped after $(<"$run/stopped"): the same command resumes the run"
    exit 75
fi
if [[ $asked ]]; then
    say "ended before it could save (exit code $code): the same command resumes the run from its last checkpoint"
    exit 75
fi
if ((code == 2)); then
    say "failed by a mistake in the flags or the data (exit code 2): not started again"
    exit 2
fi
if ! progressed; then
    say "failed without a checkpoint since it started (exit code $code): not started again"
    exit "$((code ? code : 1))"
fi
if ((restarts >= ${MAX_RESTARTS:-200})); then
    say "not done, but already started again $restarts times (MAX_RESTARTS)"
    exit 1
fi
say "crashed (exit code $code): starting again from its last checkpoint"
export VM_RESTARTS=$((restarts + 1))
exec bash "$launch_dir/vm.sh" "$@"
