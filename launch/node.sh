#!/usr/bin/env bash
# One machine's part of a training on one or several: checks, then torchrun. Slurm, Kubernetes and SkyPilot start this, and people over ssh.
# `node.sh -h` tells how.
set -euo pipefail
set -m # what is started gets a process group of its own: Ctrl-C reaches this script alone, which passes it on as a wish to save and stop

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

usage() {
    cat <<'EOF'
usage: launch/node.sh [--hosts HOST,HOST,...] [options] -- ARGUMENTS OF videoqat train

Start it on every machine of the run with the same arguments. Without --hosts the run has this machine alone.

  --hosts LIST      names or addresses of all machines, this one included; they meet at the first
  --port N          where they meet: a free port of the first host that the others may reach (29500)
  --processes N     processes on this machine (one for each GPU)
  --id NAME         of this run, if several share hosts (videoqat)
  --wait SECONDS    how long to wait for the other machines at the start (1800)
  --env FILE        shell file with environment variables to set first, such as launch/env/network.env
  --no-preflight    start without launch/preflight.py
  -h, --help        this text

DRY_RUN=1 launch/node.sh ... prints the commands and runs nothing.

Which machine gets which rank is settled when they meet; there is no node rank to give.
SIGUSR1, SIGTERM, SIGINT and SIGHUP let the running step finish and be saved. A second SIGINT (Ctrl-C) ends at once.

exit codes: 0 trained to the end; 1 failed; 2 bad input (one line says what); 75 stopped by a signal, all saved, start again to continue;
130 stopped by a signal, nothing saved (train.save_every=0, or asked twice)

example, on each of two machines:
  launch/node.sh --hosts node-a,node-b -- --config train/wan2.1-1.3b model.path=/data/wan cache=/data/cache out=/data/run
EOF
}

say() { echo "node.sh on ${HOSTNAME:-$(hostname)}: $*" >&2; }

fail() {
    echo "node.sh: $*" >&2
    exit 2
}

hosts='' port=29500 processes=gpu id=videoqat wait_s=1800 env_file='' preflight=yes
while [ $# -gt 0 ]; do
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}" # --port=29500
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --no-preflight)
            preflight=no
            shift
            continue
            ;;
        --)
            shift
            break
            ;;
        --hosts | --port | --processes | --id | --wait | --env) ;;
        -*) fail "unknown option $1; what is meant for videoqat train comes after --, as in: node.sh -- --config train/tiny out=run" ;;
        *) fail "$1 comes before --; what is meant for videoqat train comes after it, as in: node.sh -- --config train/tiny out=run" ;;
    esac
    [ $# -ge 2 ] && [ -n "$2" ] && [ "$2" != -- ] || fail "$1 needs a value"
    case $1 in
        --hosts) hosts=$2 ;;
        --port) port=$2 ;;
        --processes) processes=$2 ;;
        --id) id=$2 ;;
        --wait) wait_s=$2 ;;
        --env) env_file=$2 ;;
    esac
    shift 2
done
[ $# -gt 0 ] || fail "nothing to train: give the arguments of videoqat train after --, as in: node.sh -- --config train/tiny out=run"
for pair in "--port $port" "--wait $wait_s" "--processes ${processes/#gpu/1}"; do
    [[ $pair =~ ^--[a-z]+\ [1-9][0-9]*$ ]] || fail "$pair: legal is a whole number from 1 on"
done
[ "$port" -le 65535 ] || fail "--port $port: legal is 1 to 65535"
[[ $id =~ ^[A-Za-z0-9._-]+$ ]] || fail "--id $id: legal are letters, digits, dot, underscore and hyphen"
[[ -z $hosts || $hosts =~ ^[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$ ]] || fail "--hosts $hosts: legal are names or IPv4 addresses parted by commas"
IFS=, read -r -a host_list <<<"$hosts"
nodes=${#host_list[@]}
[ "$nodes" -gt 0 ] || nodes=1

if [ -n "$env_file" ]; then
    [ -r "$env_file" ] && [ ! -d "$env_file" ] || fail "--env $env_file: no such file, or not readable"
    [[ $env_file == */* ]] || env_file=./$env_file # a bare name would be looked for on PATH first
    set -a
    # shellcheck source=/dev/null
    . "$env_file"
    set +a
fi
# Compiled kernels: on the machine's own disk, since many machines that write into one home folder get in each other's way.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/videoqat-triton-$(id -u)}"
# As torchrun would set it, without its warning.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

status="${TMPDIR:-/tmp}/videoqat-$id.XXXXXX" # a folder that tells how each worker ended, see worker.py
meet=(python3 "$here/meet.py" --hosts "$hosts" --port "$port" --seconds "$wait_s")

# torchrun_command NAME IS_HOST: the launcher up to the program, in `launcher`. --max-restarts 0: a failed run is started again from outside,
# where the reason can be seen. is_host: meet.py has found out who can open the port; torchrun would guess it from names.
torchrun_command() {
    launcher=(torchrun --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts 0)
    if [ "$nodes" -eq 1 ]; then
        launcher+=(--standalone)
    else
        launcher+=(--rdzv-backend c10d --rdzv-endpoint "${host_list[0]}:$port" --rdzv-id "$id-$1")
        launcher+=(--rdzv-conf "join_timeout=$wait_s,read_timeout=$wait_s,is_host=$2")
    fi
}

if [ "${DRY_RUN:-0}" = 1 ]; then
    show() {
        printf '%q ' "$@"
        echo
    }
    show export "TRITON_CACHE_DIR=$TRITON_CACHE_DIR" "OMP_NUM_THREADS=$OMP_NUM_THREADS"
    is_host=false # in a real run it is found by meet.py
    [ "$nodes" -eq 1 ] || show "${meet[@]}"
    if [ "$preflight" = yes ]; then
        torchrun_command preflight "$is_host"
        show "${launcher[@]}" "$here/preflight.py" "$@"
        [ "$nodes" -eq 1 ] || show "${meet[@]}"
    fi
    torchrun_command train "$is_host"
    show "${launcher[@]}" "$here/worker.py" "$status" train "$@"
    exit 0
fi

for program in torchrun python3; do
    command -v "$program" >/dev/null || fail "$program is not on PATH: activate the environment in which videoqat is installed"
done
if [ "$processes" = gpu ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    fail "no NVIDIA GPU on ${HOSTNAME:-this machine} (there is no /dev/nvidiactl); to train on CPUs give --processes N"
fi

status=$(mktemp -d "$status") || fail "${TMPDIR:-/tmp} can't be written to; TMPDIR names another folder"

# Signals are noted here and acted upon by `supervise`.
asked='' hurry=''
# shellcheck disable=SC2329 # called by the traps
on_signal() {
    if [ -z "$asked" ]; then
        asked=$1
        say "SIG$1: saving and stopping"
    elif [ "$1" = INT ]; then # someone at the keyboard; schedulers may send one SIGTERM by several roads
        hurry=yes
        say "second SIGINT: stopping without saving"
    fi
}
for name in USR1 TERM INT HUP; do
    # shellcheck disable=SC2064 # the name as it is now
    trap "on_signal $name" "$name"
done

# workers: the process ids of those that live. One that has ended leaves its number here, which the system gives to others: a worker is told by $status.
workers() {
    local file pid
    for file in "$status"/*.pid; do
        pid=$(cat "$file" 2>/dev/null) || continue
        ! grep -qsaF -- "$status" "/proc/$pid/cmdline" || echo "$pid"
    done
}

# shellcheck disable=SC2329 # called by the trap
clean_up() {
    # Only if torchrun was killed outright are there still workers, and they would hold the GPUs.
    # shellcheck disable=SC2046 # one word each
    kill -KILL $(workers) 2>/dev/null || true
    rm -rf -- "$status"
}
trap clean_up EXIT

# start COMMAND...: in the background, as `child`. It and all that it starts ignore SIGUSR1 until they install a handler of their own: torchrun and
# workers that are still loading would die of one that a scheduler sends to every process of the job.
start() {
    (
        trap '' USR1
        exec "$@"
    ) &
    child=$!
}

# ask_workers: SIGUSR1 to each training process, once, and not before the trainer listens: that is when bit 9 of its SigCgt mask is set.
declare -A told=()
ask_workers() {
    local pid caught
    for pid in $(workers); do
        caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null) || continue
        if [ -z "${told[$pid]:-}" ] && (((0x${caught:-0} & 0x200) != 0)); then
            told[$pid]=yes
            kill -USR1 "$pid" 2>/dev/null || true
        fi
    done
}

# supervise PHASE: waits for `child` and returns its exit code. In phase `train` signals go to the training processes themselves: torchrun would
# answer one by killing them 30 seconds later, which is too soon for a large model's step and checkpoint.
supervise() {
    local ended=''
    while kill -0 "$child" 2>/dev/null; do
        sleep 1 &
        wait $! || true # a signal interrupts wait
        if [ -n "$hurry" ] || { [ -n "$asked" ] && [ "$1" != train ]; }; then
            [ -n "$ended" ] || kill -TERM "$child" 2>/dev/null || true
            ended=yes
        elif [ -n "$asked" ]; then
            ask_workers
        fi
    done
    wait "$child"
}

# before_training WHAT: waits for it. A stop that is asked for there costs nothing: 75, start again.
before_training() {
    local code=0
    supervise before || code=$?
    [ -z "$asked" ] || exit 75
    if [ "$code" -ne 0 ]; then
        say "$1 failed, nothing was started; the lines above say why"
        exit "$code"
    fi
}

come_together() {
    is_host=false
    [ "$nodes" -gt 1 ] || return 0
    start "${meet[@]}" >"$status/role"
    before_training "the meeting of the machines"
    [ "$(cat "$status/role")" != host ] || is_host=true
}

come_together
if [ "$preflight" = yes ]; then
    torchrun_command preflight "$is_host"
    start "${launcher[@]}" "$here/preflight.py" "$@"
    before_training "preflight (--no-preflight starts without)"
    come_together # so that no machine takes the rendezvous that another is just leaving for the new one
fi

torchrun_command train "$is_host"
start "${launcher[@]}" "$here/worker.py" "$status" train "$@"
code=0
supervise train || code=$?

# The worker that ended first with an exit code other than 0 tells how the training ended; torchrun only knows 0 and 1.
first=$(cat "$status"/*.exit 2>/dev/null | sort -n | head -n 1 | cut -d ' ' -f 2) || true
if [ -n "$first" ]; then
    code=$first
elif [ -n "$asked" ] && [ "$code" -ne 0 ]; then
    say "SIG$asked came, but the training ended before it could save (exit code $code)"
fi
case $code in
    0) ;;
    2) say "bad input (exit code 2): the line that begins with videoqat train, above torchrun's summary, says what" ;;
    75) say "saved; start the same command again to continue" ;;
    130) say "stopped, and nothing was saved (train.save_every=0, or asked twice)" ;;
    *) say "failed (exit code $code): torchrun's summary names the rank that failed first; the same command continues from the last checkpoint" ;;
esac
exit "$code"
