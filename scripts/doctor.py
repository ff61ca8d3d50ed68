"""Checks this machine for problems and prints a one-line fix for each: python scripts/doctor.py [--json]

With --memory MODEL [--head HEAD] [--proposer NAME] it runs a model instead, and says what memory each part takes.

Compares installed versions with the bounds of pyproject.toml, lists devices, tries a layer of each kind on the CPU, and
checks for known pitfalls. Changes nothing. The exit code is 1 if something is broken, and 0 if there are only warnings.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment

# isort: split

import importlib.util
import json
import platform
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kernels.cache import VARIABLE, writable_folder
from scripts.errors import command_line

if TYPE_CHECKING:
    import torch

    from kernels.trials import Trial

ROOT = Path(HERE).parent
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16")
# by tests/gpu_check on an H100: every kernel with the first, those that serve an 8B model in bf16 with the second
CHECKED_PTXAS = {("sm_90", "12.8.93"), ("sm_90", "13.0.88")}
GIB = 2**30
MARKS = {"ok": "ok  ", "warning": "warn", "broken": "FAIL"}


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok | warning | broken
    detail: str
    fix: str = ""


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements(pyproject: dict) -> Iterator[tuple[str, Requirement]]:
    """Yield (extra or "", requirement) for this platform, without the project's references to its own extras."""
    project = pyproject["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, lines in groups.items():
        for requirement in map(Requirement, lines):
            if requirement.name != project["name"] and (requirement.marker is None or requirement.marker.evaluate()):
                yield extra, requirement


def check_python(pyproject: dict, version: str) -> Check:
    bound = pyproject["project"]["requires-python"]
    if SpecifierSet(bound).contains(version, prereleases=True):
        return Check("python", "ok", f"{version} ({bound}), {sys.executable}")
    fix = "rm -r .venv; HEADWAY_PYTHON=python3.11 ./scripts/test.sh"
    return Check("python", "broken", f"{version}, needs {bound}", fix)


def check_package(extra: str, requirement: Requirement, version: str | None) -> Check:
    bound = str(requirement.specifier)
    if version is None:
        detail = f"not installed, needs {bound}" + (f" for the extra '{extra}'" if extra else "")
        fix = f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
        return Check(requirement.name, "warning" if extra else "broken", detail, fix)
    if not requirement.specifier.contains(version, prereleases=True):
        fix = f"pip install '{requirement.name}{bound}'"
        return Check(requirement.name, "broken", f"{version}, outside {bound}", fix)
    return Check(requirement.name, "ok", f"{version} ({bound})")


def check_kernels(version: str | None, location: Path | None) -> Check:
    """Check for Hugging Face's `kernels` distribution: it has our folder's import name, and breaks transformers."""
    if version is not None:
        detail = f"the distribution `kernels` {version} hides the folder kernels/ and breaks transformers' imports"
        return Check("kernels package", "broken", detail, "pip uninstall kernels")
    if location is None or ROOT not in location.parents:
        return Check("kernels package", "broken", f"`import kernels` finds {location}", "remove it from PYTHONPATH")
    return Check("kernels package", "ok", "`import kernels` finds this repository's folder")


def check_torch_build(torch_version: str, has_nvidia: bool, has_cuda: bool, torchvision: str | None) -> Check:
    if has_nvidia and not has_cuda:
        detail = f"there is an NVIDIA GPU, and torch {torch_version} cannot use it"
        return Check("torch build", "warning", detail, "pip install --force-reinstall torch==2.13.0")
    if "+cpu" in torch_version and torchvision is not None and "+cpu" not in torchvision:
        detail = f"torchvision {torchvision} is a CUDA build beside torch {torch_version}: importing it fails"
        return Check("torch build", "broken", detail, "pip uninstall torchvision torchaudio")
    return Check("torch build", "ok", torch_version)


def check_devices() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("devices", "ok", "cpu")
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        names.append(f"cuda:{index} {device.name} {device.total_memory / GIB:.0f} GiB sm_{device.major}{device.minor}")
    return Check("devices", "ok", ", ".join(names))


def cpu_facts(cpuinfo: str) -> tuple[str, list[str]]:
    """Return (model, the CPU_FEATURES it has) from the text of /proc/cpuinfo."""
    model, flags = "", set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    return model, [feature for feature in CPU_FEATURES if feature in flags]


def read_cpu() -> tuple[str, list[str]]:
    """Return model and CPU_FEATURES of this machine."""
    file = Path("/proc/cpuinfo")
    model, features = cpu_facts(file.read_text() if file.exists() else "")
    return model or platform.processor() or platform.machine(), features


def check_cpu() -> Check:
    import torch

    model, features = read_cpu()
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{model}; torch uses {capability}; {' '.join(features)}"
    if not torch.backends.mkldnn.is_available():
        detail += "; torch has no oneDNN, so what has no C kernel is slow"
        return Check("cpu", "warning", detail, "install torch's official wheel for this platform")
    if capability == "DEFAULT" and platform.machine() == "x86_64":
        fix = "unset ATEN_CPU_CAPABILITY; if it is not set, this CPU has no AVX2 and will be slow"
        return Check("cpu", "warning", detail, fix)
    return Check("cpu", "ok", detail)


def check_cpu_kernels(library: object, compiler: str | None, switch: str | None) -> Check:
    """Check which CPU kernels are used; `library` is the loaded library or None, `switch` is HEADWAY_CPU_KERNELS."""
    if library is not None:
        return Check("cpu kernels", "ok", f"in C, built by {compiler}")
    if switch == "torch":
        return Check("cpu kernels", "warning", "in torch, several times slower", "unset HEADWAY_CPU_KERNELS")
    fix = "python -c 'from kernels.cpu.library import library; library()' says what failed"
    if compiler is None:
        fix = "install a C compiler (Debian: apt-get install gcc)"
    return Check("cpu kernels", "warning", "in torch, several times slower", fix)


def check_threads(cores: int, threads: int, omp: str | None) -> Check:
    detail = f"{threads} of torch on {cores} usable cores" + (f" (OMP_NUM_THREADS={omp})" if omp else "")
    if threads > cores:
        return Check("threads", "warning", detail + ": they would take turns", f"engine.threads={cores}")
    return Check("threads", "ok", detail)


def check_disk(free: float, folder: Path) -> Check:
    detail = f"{free / GIB:.1f} GiB free at {folder}"
    if free < GIB:
        return Check("disk", "broken", detail, "free some: a checkpoint of a small head needs a few hundred MB")
    return Check("disk", "ok" if free >= 5 * GIB else "warning", detail, "" if free >= 5 * GIB else "free some")


def check_cache(folder: Path, temporary: str) -> Check:
    if not folder.is_relative_to(temporary):
        return Check("cache", "ok", str(folder))
    detail = f"{folder} is among the temporary files, so kernels, measured costs and models are lost with those"
    return Check("cache", "warning", detail, f"name a folder that can be written by XDG_CACHE_HOME or {VARIABLE}")


def check_demo(folder: Path) -> Check:
    missing = [name for name in ("config.json", "tokenizer.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        return Check("demo target", "broken", f"models/demo lacks {', '.join(missing)}", "git checkout models/demo")
    size = (folder / "model.safetensors").stat().st_size / 2**20
    return Check("demo target", "ok", f"models/demo, {size:.1f} MiB of weights")


def check_triton_interpret(value: str | None) -> Check:
    if value and value != "0":
        detail = f"TRITON_INTERPRET={value}: every Triton kernel runs in the interpreter, a thousand times slower"
        return Check("triton interpreter", "warning", detail, "unset TRITON_INTERPRET")
    return Check("triton interpreter", "ok", "TRITON_INTERPRET is not set")


def check_ptxas(architecture: str, path: str | None, version: str | None, *, contracts: bool) -> Check:
    """`path` and `version`: of the ptxas that Triton calls for sm_90, ...; None if it could not be asked. `contracts`:
    it fuses multiplications and additions that must round apart.
    """
    named = f"{version or 'unknown'} ({path or 'none that runs'})"
    if contracts:
        from kernels.triton.assembler import CURE

        return Check("ptxas", "broken", f"{named} fuses what kernels of {architecture} round apart", CURE)
    if (architecture, version) in CHECKED_PTXAS:
        return Check("ptxas", "ok", f"{named}, whose kernels gave the right results on {architecture}")
    fix = "./scripts/gpu_check.sh --only kernels checks them, by every ptxas that it finds"
    return Check("ptxas", "warning", f"{named}, whose kernels nobody has checked on {architecture}", fix)


def ask_ptxas(device: torch.device) -> Check:
    """Ask Triton which ptxas it calls for this GPU, and what that makes of a multiplication and an addition."""
    from kernels.triton import assembler
    from kernels.triton.device import limits

    capability = limits(device).capability
    path, version = assembler.ptxas(capability), assembler.version_in_use(capability)
    return check_ptxas(f"sm_{capability}", path, version, contracts=assembler.contracts(device))


def run_checks() -> list[Check]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    spec = importlib.util.find_spec("kernels")
    checks = [
        check_python(pyproject, platform.python_version()),
        *(check_package(extra, each, installed_version(each.name)) for extra, each in requirements(pyproject)),
        check_kernels(installed_version("kernels"), Path(spec.origin).resolve() if spec and spec.origin else None),
        check_disk(shutil.disk_usage(ROOT).free, ROOT),
        check_cache(writable_folder(), os.environ.get("TMPDIR") or "/tmp"),
        check_demo(ROOT / "models" / "demo"),
        check_triton_interpret(os.environ.get("TRITON_INTERPRET")),
    ]
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        fix = "pip install --force-reinstall torch==2.13.0"
        return [*checks, Check("torch", "broken", f"import fails: {error}", fix)]
    has_nvidia, has_cuda = shutil.which("nvidia-smi") is not None, torch.cuda.is_available()
    checks.append(check_torch_build(torch.__version__, has_nvidia, has_cuda, installed_version("torchvision")))
    if has_cuda:
        checks.append(ask_ptxas(torch.device("cuda", torch.cuda.current_device())))
    from kernels.cpu.library import SWITCH, compiler, library

    checks.append(check_cpu_kernels(library(), compiler(), os.environ.get(SWITCH)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks.append(check_threads(cores, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")))
    checks += [check_devices(), check_cpu()]
    from kernels.trials import try_all

    with torch.no_grad():
        return [*checks, *(check_layer(trial, has_kernels=library() is not None) for trial in try_all())]


def check_layer(trial: Trial, *, has_kernels: bool) -> Check:
    """Say what computes a kind of layer, and how fast.

    A wrong layer is broken; a slow one is a warning where C kernels should serve it. Without those all are slow, for
    the one reason that another check names. fp16 has none anywhere.
    """
    from kernels.cpu.level import level
    from kernels.trials import IN_C

    name = f"layer: {trial.name}"
    if trial.fault:
        fix = "HEADWAY_CPU_KERNELS=torch serves without it; report this processor"
        return Check(name, "broken", f"{trial.kernel or 'nothing'}: {trial.fault}", fix)
    detail = trial.detail.replace(IN_C, f"C, {level()}", 1)
    if not trial.slower:
        return Check(name, "ok", detail)
    if has_kernels and "float16" not in trial.name.split():
        return Check(name, "warning", f"{detail}, slow", trial.slower)
    return Check(name, "ok", f"{detail}, slow ({trial.slower})")


def memory_by_part(model: str, head: str | None, proposer: str, tokens=200) -> Iterator[tuple[str, float, float]]:
    """Load and run an engine as the commands do; yield each part, the MiB that it added, and all that are resident."""
    before = 0.0
    for part in parts_of_memory(model, head, proposer, tokens):
        now = infer.options.environment.process_bytes("VmRSS") / 2**20
        yield part, now - before, now
        before = now


def parts_of_memory(model: str, head: str | None, proposer: str, tokens: int) -> Iterator[str]:
    yield "Python"
    import torch  # noqa: F401

    yield "torch"
    from infer.batch.params import SamplingParams
    from infer.engine import Engine

    yield "Headway and other libraries"
    engine = Engine.load(model, head, None, proposer, profile=False)
    infer.options.environment.wake_collector()
    yield f"models and tokenizer (weights: {engine.memory.weights / 2**20:.0f})"
    engine.profile()
    infer.options.environment.wake_collector()
    yield "profile of costs, if none was stored"
    prompts, params = [[n, *range(20, 43)] for n in range(16)], SamplingParams(max_tokens=tokens, ignore_eos=True)
    per_token = engine.memory.kv / (engine.memory.pages + 1) / engine.config.page_size / 2**20
    groups = {"first": [prompts[:1]], "next seven": [[each] for each in prompts[1:8]], "eight at once": [prompts[8:]]}
    for name, batches in groups.items():
        for batch in batches:
            engine.generate(batch, params)
        yield f"answers: {name} (KV: {per_token * sum(map(len, batches)) * (24 + tokens):.0f})"
    engine.close()


def main(argv: list[str]) -> int:
    parser = command_line("doctor.py", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--memory", metavar="MODEL", help="load and run this model and say what memory each part takes")
    parser.add_argument("--head", help="of the model, with --memory")
    parser.add_argument("--proposer", default="auto", help="with --memory (default: auto)")
    arguments = parser.parse_args(argv)
    if arguments.memory:
        for name, more, now in memory_by_part(arguments.memory, arguments.head, arguments.proposer):
            print(f"{name:<44} {more:+7.0f}  {now:6.0f} MiB", flush=True)
        return 0
    as_json = arguments.json
    checks = run_checks()
    broken = any(check.status == "broken" for check in checks)
    if as_json:
        print(json.dumps({"ok": not broken, "checks": [asdict(check) for check in checks]}, indent=2))
        return int(broken)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{MARKS[check.status]}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            print(f"{'':{width + 8}}fix: {check.fix}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
