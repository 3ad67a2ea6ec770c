# Sourced by launchers that watch a run until it is done, after common.sh: the run folder, requests to stop, and whether
# another start would help.
# shellcheck shell=bash disable=SC2034,SC2154
#
#   who    how the launcher names this start in its messages, such as "job 7, start 0: "

say() { echo "launch: $who$*"; }

# value FLAG: its value in the flags, as argparse will read it: the last one wins
value() {
    local found='' before='' flag
    for flag in "${flags[@]}"; do
        if [[ $before == "$1" ]]; then found=$flag; fi
        if [[ $flag == "$1="* ]]; then found=${flag#*=}; fi
        before=$flag
    done
    printf '%s\n' "$found" # echo would take a name of -n for an option
}

# find_run NAME: the run folder, in `run`, with this name unless the flags have one. It is determined here, so that it
# stays the same at every start.
find_run() {
    if [[ ! $(value --name) ]]; then flags=(--name "$1" "${flags[@]}"); fi
    local logs
    logs=$(value --logs)
    run=${logs:-logs}/$(value --name)
    flags=(--resume latest "${flags[@]}")
    # The caller's --resume is where the run began; once the run has its own checkpoint, it resumes from that.
    if [[ $(find "$run/checkpoints" -name '*.pt' 2>/dev/null) ]]; then flags+=(--resume latest); fi
}

# A run renews its lock every ten seconds; the folder of a live run is left alone.
in_use() { [[ $(find "$run/lock" -size +0 -newermt '-45 seconds' 2>/dev/null) ]]; }

# claim_run RANKS: wait until no other run uses the folder, and remove what an earlier start left in it.
claim_run() {
    local waited before=''
    mkdir -p "$run"
    for ((waited = 0; waited < 60; waited += 5)); do
        if ! in_use; then break; fi
        sleep 5
    done
    if in_use; then
        say "$run is in use by another run: $(<"$run/lock")"
        exit 1
    fi
    rm -f "$run"/{stop,stopped,done}
    if [[ -e $run/started ]]; then before=$(<"$run/started"); fi
    echo "$1" >"$run/started" # its time tells which checkpoints are of this start
    if [[ ! $before || $before == "$1" ]]; then return; fi
    if [[ $(value --global-batch-size) ]]; then
        say "$1 ranks instead of $before: accumulation keeps the global batch of $(value --global-batch-size)"
    else
        say "$1 ranks instead of $before: the global batch changes with them, since --global-batch-size is not given"
    fi
}

# ask WHY: ask the ranks to save and exit, through a file that rank 0 watches. A second request ends them at once; those
# within five seconds count as one.
asked=
ask() {
    if [[ ! $asked ]]; then
        asked=$SECONDS
        say "$1: asking the run to save and exit"
        touch "$run/stop"
    elif ((SECONDS - asked > 5)); then
        say "$1 again: ending the run"
        kill "$step"
    fi
}

# run_command COMMAND...: run it to its end, and leave its exit code in `code`.
run_command() {
    "$@" & # in the background, because a trap would otherwise wait for its end
    step=$!
    code=0
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    wait "$step" || code=$?
}

# Whether this start has written a checkpoint. A crashed run is started again only then: a wrong flag fails every time.
progressed() { [[ $(find "$run/checkpoints" -name '*.pt' -newer "$run/started" 2>/dev/null) ]]; }
