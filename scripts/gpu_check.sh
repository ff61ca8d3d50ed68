#!/usr/bin/env bash
# Checks and times this machine's GPU: every kernel, the engine's exactness, speculation end to end; under 9 minutes.
# Uses .venv's Python if there is one, else python3 (or PYTHON=...). Needs no network; --help lists the options.
# Without a GPU:
#   ./scripts/gpu_check.sh --interpret
# On a machine that has torch, triton and transformers but not the rest, copy three packages to it as wheels:
#   pip wheel --no-deps -w wheels hydra-core==1.3.* omegaconf==2.3.* antlr4-python3-runtime==4.9.3
#   pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site ./scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m scripts.gpu_check "$@"
