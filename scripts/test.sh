#!/usr/bin/env bash
# Lint, format, types, tests. Makes .venv if need be. Arguments go to pytest: ./scripts/test.sh tests/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh dev

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright --pythonpath "$PYTHON"
"$PYTHON" -m pytest -q "$@"
