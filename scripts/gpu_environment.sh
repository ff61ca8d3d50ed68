#!/usr/bin/env bash
# Makes an environment with the packages that a lent GPU machine has, and no others, to try there what will run there:
#
#   PYTHON="$(./scripts/gpu_environment.sh)" ./scripts/gpu_check.sh --interpret
#
# Prints its interpreter. Returns at once when it is complete; else it takes some minutes and 5 GB (torch brings CUDA).
#   GPU_ENVIRONMENT  its folder; else $XDG_CACHE_HOME/headway/gpu-machine, with ~/.cache for the former
#   GPU_PYTHON       the Python 3.12 to make it with; else the first found
set -euo pipefail

PACKAGES=(
    torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy==2.5.2 tokenizers==0.23.2 safetensors==0.8.0
    huggingface-hub==1.33.0 accelerate==1.15.0 pytest hypothesis
)
FOLDER="${GPU_ENVIRONMENT:-${XDG_CACHE_HOME:-$HOME/.cache}/headway/gpu-machine}"
STAMP="$FOLDER/.headway-packages"

say() { printf 'headway: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${GPU_PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "no Python 3.12 found; set GPU_PYTHON"
    exit 2
}

if [[ "$(cat "$STAMP" 2>/dev/null)" != "${PACKAGES[*]}" ]]; then
    python="$(find_python)"
    say "making $FOLDER with $python: ${PACKAGES[*]}"
    "$python" -m venv --clear "$FOLDER"
    "$FOLDER/bin/python" -m pip install -q --no-compile --disable-pip-version-check "${PACKAGES[@]}" >&2
    printf '%s' "${PACKAGES[*]}" >"$STAMP"
fi
printf '%s\n' "$FOLDER/bin/python"
