# Sourced by launchers and recipes: the settings of the site, the environment of a run, and --dry-run.
# shellcheck shell=bash disable=SC2034
#
#   PYTHON   how to start Python on a node (default: python3); in the site file it may be an array, such as a container
#   SITE     the site file (default: site.sh next to this file)

unset CDPATH # with it, cd would search other folders
launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${SITE:-} && ! -r $SITE ]]; then
    printf 'SITE=%q: this file cannot be read.\n' "$SITE" >&2
    exit 2
fi
SITE=${SITE:-$launch_dir/site.sh}
if [[ $SITE != */* ]]; then SITE=./$SITE; fi # PATH is searched for a name without a slash
if [[ -e $SITE ]]; then
    # shellcheck source=launch/site.sh
    source "$SITE"
fi

# Shell arithmetic runs the commands in a value such as x[$(command)], so numbers are digits and nothing else.
for number in NPROC NNODES PORT JOIN_SECONDS MAX_RESTARTS VM_RESTARTS TORCH_ELASTIC_SHUTDOWN_TIMEOUT \
    SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_RESTART_COUNT SLURM_GPUS_ON_NODE SLURM_CPUS_PER_TASK; do
    if [[ ! ${!number:-0} =~ ^(0|[1-9][0-9]{0,17})$ ]]; then
        printf '%s=%q: give a whole number in digits.\n' "$number" "${!number}" >&2
        exit 2
    fi
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}                # a rank and its data workers share the cores
export PYTHONFAULTHANDLER=1                                 # a crash in C leaves a trace
export PYTHONUNBUFFERED=1                                   # the log is complete when a process is killed
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1                    # a lost rank ends the others instead of hanging them
# A signal to torchrun is passed on to the ranks, which have this many seconds to finish a step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# torchrun never restarts a run: the same command resumes it from its checkpoint.
torchrun_options=(--max-restarts 0 '--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2')
torchrun=("${PYTHON[@]:-python3}" -m torch.distributed.run "${torchrun_options[@]}")
# The same, and its exit code is that of the first rank that failed.
torchrun_with_code=("${PYTHON[@]:-python3}" "$launch_dir/torchrun.py" "${torchrun_options[@]}")
# `-m --` keeps torchrun from taking --logs for an option of its own.
module=(-m -- pcmepp_openclip.train)

# The caller's arguments without --dry-run [RANKS].
flags=()
dry_run=
dry_ranks=
before=
for flag in "$@"; do
    if [[ $flag == --dry-run ]]; then
        dry_run=1
    elif [[ $before == --dry-run && $flag =~ ^[0-9]+$ ]]; then
        dry_ranks=$flag
    else
        flags+=("$flag")
    fi
    before=$flag
done

# start COMMAND...: exec it, or with --dry-run print it as a shell command.
start() {
    if [[ $dry_run ]]; then
        printf '%q ' "$@"
        echo
        exit 0
    fi
    exec "$@"
}

# start_recipe FLAGS...: pass a recipe's flags to the launcher in LAUNCH, then the caller's, since the last one wins.
start_recipe() {
    local launcher=("$launch_dir/local.sh")
    if [[ ${LAUNCH:-} ]]; then read -ra launcher <<<"$LAUNCH"; fi
    local command=("${launcher[@]}" --logs "${LOGS:-logs}" --name "${NAME:-$(basename "$0" .sh)}" --resume latest
        "$@" "${flags[@]}")
    # A launcher prints its own command, and `pcmepp train` what it would do; nothing is submitted.
    if [[ $dry_run && ${launcher[0]} != sbatch ]]; then exec "${command[@]}" --dry-run ${dry_ranks:+"$dry_ranks"}; fi
    start "${command[@]}"
}
