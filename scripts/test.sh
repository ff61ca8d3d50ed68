#!/usr/bin/env bash
# Lint, format, types, tests. Makes .venv if needed. Arguments go to pytest: ./scripts/test.sh tests/unit -k config
# `./scripts/test.sh fast` runs lint, format and the tests that tests/fast.txt lists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh dev

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# One worker per core and one thread per worker: with two threads, one that shares its core with another process would
# delay the other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
pytest=("$PYTHON" -m pytest -q -n auto --dist worksteal)
if [ "${1:-}" = fast ]; then
    exec "${pytest[@]}" @tests/fast.txt "${@:2}"
fi
# Tests start many processes, which compile every module anew where PYTHONDONTWRITEBYTECODE is set.
"$PYTHON" -m compileall -q -j 0 infer kernels models scripts train
# Types are checked in parallel with the first tests, because pyright uses one core.
types=$(mktemp)
"$PYTHON" -m pyright --pythonpath "$PYTHON" >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
result=0
"${pytest[@]}" --durations 25 --durations-min 5 "$@" || result=$?
wait "$checker" || result=1
cat "$types"
exit "$result"
