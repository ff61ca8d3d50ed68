#!/usr/bin/env bash
# Checks and times this machine's GPU: every kernel, the engine's exactness, speculation, training.
#   ./scripts/gpu_check.sh                all parts, in eighteen minutes
#   ./scripts/gpu_check.sh --call 1       the first half of them, in nine; --call 2: the other one
#   ./scripts/gpu_check.sh --dry-run      what would run, and how long it takes at most
#   ./scripts/gpu_check.sh --interpret    without a GPU, in Triton's interpreter
# Uses .venv's Python if there is one, else python3 (or PYTHON=...). Needs no network; --help lists the options, and
# scripts/README.md says what the report contains, and which packages a machine needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m tests.gpu_check "$@"
