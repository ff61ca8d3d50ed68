#!/usr/bin/env bash
# From a fresh clone to a measured speed-up: trains a head for the demo target, then generates with it and without it.
# Makes .venv if need be. An earlier head in outputs/heads/demo/eagle3 is replaced. Arguments go to the training command: ./scripts/quickstart.sh minutes=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh train,serve
trap 'exit 130' INT # training ends well when it is interrupted; what follows it must not begin then

run() {
    printf '\n+'
    printf ' %q' "$PYTHON" "$@"
    printf '\n'
    "$PYTHON" "$@"
}

run train/run.py model=demo head=eagle3 overwrite=true "$@"
run infer/generate.py model=demo head=eagle3 compare=true
