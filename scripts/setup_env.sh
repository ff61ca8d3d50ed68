# Sourced by test.sh (`source setup_env.sh dev`) and quickstart.sh (`source setup_env.sh train,serve`): makes .venv at the
# repository root if need be, installs Headway with those extras, and leaves the interpreter in $PYTHON.
# Returns at once when there is nothing to do: a stamp in .venv holds the hash of the installed pyproject.toml.
#
#   HEADWAY_PYTHON       the Python (3.11 or later) to make .venv with; else the first that fits of python3, python3.14, ...
#   HEADWAY_TORCH_INDEX  the package index to take torch from, such as PyTorch's CPU index on a machine without a GPU
#   HEADWAY_CONSTRAINTS  a file of versions to install and no others, such as constraints.txt
#   HEADWAY_TRITONS      versions of Triton, as in "3.6 3.7 3.8 3.9", that tests of dev compile with besides .venv's

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
TORCH_RANGE="$(sed -n 's/^ *"\(torch>=[^"]*\)",$/\1/p' "$ROOT/pyproject.toml")" # torch>=2.11,<2.15
TORCH_CPU="torch==2.13.0"
TRITON="triton==3.7.1" # what the CUDA builds of that torch pin; its CPU build pins none, so pip would take the newest
LM_EVAL="lm_eval==0.4.13"
# The oldest and the newest Triton that pyproject.toml allows: of "triton>=3.6,<3.10" 3.6 and 3.9.
TRITONS="$(sed -n 's/^ *"triton>=\([0-9.]*\),<\([0-9]*\)[.]\([0-9]*\);.*/\1 \2 \3/p' "$ROOT/pyproject.toml" |
    { read -r oldest major minor && printf '%s %s.%s' "$oldest" "$major" "$((minor - 1))"; })"

# pip's advice (a newer pip, running as root, ignored locations) is no concern of a reader; -qq leaves errors.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1

say() { printf 'headway: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

find_python() {
    local candidate
    for candidate in ${HEADWAY_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or later found (tried: ${HEADWAY_PYTHON:-python3, python3.11 to python3.14}); set HEADWAY_PYTHON"
}

# Tests whether this Python has a torch version in the range. Reads metadata only; does not import torch.
has_torch() {
    "$1" - "$TORCH_RANGE" 2>/dev/null <<'PY'
import re, sys
from importlib.metadata import version
release = [int(part) for part in version("torch").split("+")[0].split(".")[:2]]
low, high = ([int(part) for part in bound.split(".")] for bound in re.findall(r"\d+\.\d+", sys.argv[1]))
sys.exit(not low <= release < high)
PY
}

make_venv() {
    local python options=()
    python="$(find_python)"
    # An already installed torch is reused, because it matches the machine's GPU, or its lack of one.
    if "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' && has_torch "$python"; then
        options=(--system-site-packages)
    fi
    say "making .venv with $python ${options[*]:-}"
    if ! "$python" -m venv ${options[@]+"${options[@]}"} "$ROOT/.venv"; then
        rm -rf "$ROOT/.venv"
        die "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    fi
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

pip_knows_cpu_torch() {
    "$PYTHON" -m pip install -qq --dry-run --no-deps --report - "$TORCH_CPU" 2>/dev/null | grep -q '"version": "[^"]*+cpu"'
}

# Installs torch before everything else, because a plain dependency on torch would install the CUDA build even without a
# GPU.
install_torch() {
    if [ -n "${HEADWAY_TORCH_INDEX:-}" ]; then
        say "installing torch from HEADWAY_TORCH_INDEX"
        "$PYTHON" -m pip install -qq "$TORCH_RANGE" --index-url "$HEADWAY_TORCH_INDEX"
        return
    fi
    if has_gpu || [ "$(uname -s)" != Linux ]; then
        return # pip's own choice is right here
    fi
    if ! pip_knows_cpu_torch; then
        say "no GPU here, and pip knows no CPU build of torch: it will bring several GB of CUDA packages as well."
        say "To avoid that, stop now (Ctrl-C) and set HEADWAY_TORCH_INDEX to PyTorch's CPU index. Going on in 10 seconds."
        sleep 10
    fi
    say "installing $TORCH_CPU"
    "$PYTHON" -m pip install -qq --no-compile "$TORCH_CPU"
}

triton_of_torch() {
    if [ "$(uname -s)" = Linux ] && "$PYTHON" -m pip list --format=freeze 2>/dev/null | grep -q "^$TORCH_CPU\b"; then
        printf '%s' "$TRITON"
    fi
}

setup_env() {
    local extras="$1" stamp="$ROOT/.venv/.headway-installed" hash
    [ -x "$PYTHON" ] || make_venv
    hash="$("$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$ROOT/pyproject.toml")"
    # The extra dev contains all others.
    if grep -qsxF -e "$hash dev" -e "$hash $extras" "$stamp"; then return; fi
    has_torch "$PYTHON" || install_torch
    say "installing headway[$extras] into .venv (a few minutes the first time)"
    "$PYTHON" -m pip install -qq --no-compile -e "$ROOT[$extras]" $(triton_of_torch) \
        ${HEADWAY_CONSTRAINTS:+-c "$HEADWAY_CONSTRAINTS"}
    # Tests run lm_eval's API clients; without --no-deps scipy, scikit-learn and more for its metrics would add 300 MB.
    if [ "$extras" = dev ]; then "$PYTHON" -m pip install -qq --no-deps "$LM_EVAL"; fi
    compile_packages
    printf '%s\n' "$hash $extras" >>"$stamp"
}

# With PYTHONDONTWRITEBYTECODE, which many images set, every start would compile torch's sources anew: `import torch` took
# 2.7 s in place of 1.1 s. Some packages hold files that are no Python, so errors do not matter.
compile_packages() {
    "$PYTHON" -m compileall -q -j 0 "$ROOT"/.venv/lib/python*/site-packages >/dev/null 2>&1 || true
}

# The playground's tests drive a real browser; it is installed if the user has the permission.
ensure_browser() {
    if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "no Chromium: tests/server/test_playground.py is skipped; install it (Debian: apt-get install chromium)"
        return
    fi
    say "installing Chromium for the playground's tests"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
}

# Tests run on processors that this machine lacks, in an emulator, on kernels that a cross compiler built, and on kernels
# of another compiler than the machine's own.
ensure_emulators() {
    local packages="qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross clang"
    if command -v qemu-x86_64 && command -v aarch64-linux-gnu-gcc && command -v clang; then return; fi >/dev/null
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "tests of other processors and compilers are skipped for want of some of these (Debian: apt-get install $packages)"
        return
    fi
    say "installing emulators and compilers for the tests of other processors and compilers"
    # shellcheck disable=SC2086
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null ||
        say "they could not be installed: those tests are skipped"
}

# tests/kernels/triton compile with other versions as well. They lie outside of .venv, whose Triton is the one that torch
# wants, and outside of the tree, which every CI run makes anew.
ensure_tritons() {
    local tag folder version
    if [ "$(uname -s)" != Linux ]; then return; fi
    tag="$("$PYTHON" -c 'import sys; print(sys.implementation.cache_tag)')"
    for version in $TRITONS ${HEADWAY_TRITONS:-}; do
        folder="${HEADWAY_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/headway}/triton-$version-$tag"
        if [ -d "$folder" ]; then continue; fi
        say "installing triton $version into $folder (200 to 300 MB to fetch)"
        rm -rf "$folder.new"
        "$PYTHON" -m pip install -qq --no-compile --no-deps --target "$folder.new" "triton==$version.*"
        mv -T "$folder.new" "$folder"
    done
}

setup_env "$1"
if [ "$1" = dev ]; then
    ensure_browser
    ensure_emulators
    ensure_tritons
fi
