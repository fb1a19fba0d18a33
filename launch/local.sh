#!/usr/bin/env bash
# Training on all GPUs of this machine. `local.sh -h` tells how.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

usage() {
    cat <<'EOF'
usage: launch/local.sh [options] -- ARGUMENTS OF videoqat train

Trains on all GPUs of this machine, after a check of what usually goes wrong.

  --processes N     so many processes instead of one for each GPU (on a machine without GPUs: give it)
  --env FILE        shell file with environment variables to set first, such as launch/env/network.env
  --no-preflight    start without checking
  -h, --help        this text

DRY_RUN=1 launch/local.sh ... prints the commands and runs nothing.
Ctrl-C (or SIGTERM, SIGUSR1) saves and ends with exit code 75; the same command continues. A second Ctrl-C ends at once.

example:
  launch/local.sh -- --config train/wan2.1-1.3b model.path=Wan2.1-T2V-1.3B-Diffusers cache=cache out=run
EOF
}

for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit 0
            ;;
        --hosts | --hosts=*)
            echo "local.sh: --hosts is for several machines: start launch/node.sh on each" >&2
            exit 2
            ;;
        --) break ;;
    esac
done
exec "$here/node.sh" "$@"
