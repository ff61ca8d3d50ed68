#!/usr/bin/env bash
# Packages: triton 3.7.1 and 3.9.0 (compiled for sm_90, no GPU), numpy 2.4.6.
# Behaviour: a tuple assignment with a dtype among its values, `count, kind = n + 1, out.dtype.element_ty`, does not
#   compile: AttributeError, "'dtype' object has no attribute 'type'", at that statement; nor does one of two dtypes. The
#   same values in two statements compile.
# One would have guessed: what can be assigned can be assigned in a tuple; Triton's interpreter runs such a kernel.
# Why it matters: a kernel whose tests pass in the interpreter fails only once it is compiled for a GPU.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cat >"$folder/show.py" <<'PY'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def apart(out, n):
    count = n + 1
    kind = out.dtype.element_ty
    tl.store(out, count.to(kind))


@triton.jit
def in_a_tuple(out, n):
    count, kind = n + 1, out.dtype.element_ty
    tl.store(out, count.to(kind))


@triton.jit
def two_dtypes(out, n):
    wide, kind = tl.float32, out.dtype.element_ty
    tl.store(out, n.to(wide).to(kind))


outcomes = []
for kernel in (apart, in_a_tuple, two_dtypes):
    source = ASTSource(fn=kernel, signature={"out": "*fp16", "n": "i32"}, constexprs={})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        outcomes.append("compiles")
    except Exception as error:
        outcomes.append(str(error).strip().splitlines()[-1])
print(triton.__version__, *zip(("apart", "in a tuple", "two dtypes"), outcomes), sep="\n  ")
assert outcomes[0] == "compiles", "the behaviour has changed"
assert all("'dtype' object has no attribute 'type'" in outcome for outcome in outcomes[1:]), "the behaviour has changed"
PY
for version in 3.7.1 3.9.0; do
    python3 -m venv --clear "$folder/env"
    "$folder/env/bin/pip" --disable-pip-version-check install --quiet "triton==$version" numpy==2.4.6
    TRITON_CACHE_DIR="$folder/cache" "$folder/env/bin/python" "$folder/show.py"
done
