"""The rules of the tree: which way imports point, which names are taken, what no file may contain."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kernels", "models", "infer", "train", "scripts")
MAY_IMPORT = {
    "kernels": set(),
    "models": {"kernels"},
    "infer": {"kernels", "models"},
    "train": {"kernels", "models", "infer"},
}
ENTRY_POINTS = (
    "train/run.py",
    "train/learn.py",
    "infer/serve.py",
    "infer/chat.py",
    "infer/generate.py",
    "infer/follower.py",
    "scripts/bench.py",
    "scripts/prove.py",
    "scripts/chaos.py",
    "scripts/doctor.py",
)
BOOTSTRAP = """\
import os
import sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or '.') != HERE]"""
# Libraries that a user may well have installed next to this one, and that this environment does not have.
FOREIGN = {
    "arctic_inference", "bitsandbytes", "deepspeed", "evaluate", "flashinfer", "lm_eval", "peft", "ray", "requests",
    "scipy", "sglang", "specforge", "speculators", "torchaudio", "torchvision", "trl", "vllm", "xformers", "xgrammar",
    "zmq",
}  # fmt: skip
FORBIDDEN_IMPORTS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# collectives that pickle: train/distributed/collectives.py and infer/processes/messages.py send JSON
PICKLING = re.compile(r"(gather|scatter|broadcast|send|recv)_object(_list)?$")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.Module) -> list[str]:
    """Return the dotted name of every imported module, including imports inside functions."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}: write it absolute"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_downwards(package: str) -> None:
    not_allowed = {*PRODUCT, "tests"} - MAY_IMPORT[package] - {package}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sources(package)
        for name in imported_modules(parse(path))
        if name.split(".")[0] in not_allowed
    ]
    assert wrong == []


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported_modules_of(path: Path, *, names: Collection[str]) -> set[str]:
    """Return the modules of `names` that a file imports, also in functions and for the type checker alone."""
    modules: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            modules |= {
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in names else module for alias in node.names
            }
    return modules & set(names)


def test_no_modules_import_each_other() -> None:
    """An import in a function or for the type checker counts too: it only hides a circle."""
    files = {module_of(path): path for path in sources(*PRODUCT)}
    graph = {name: imported_modules_of(path, names=files) - {name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ["infer", "train", "scripts/benchmarks", "scripts/faults", "scripts/proof"])
def test_a_folder_has_at_most_twelve_modules(package: str) -> None:
    counts = Counter(relative(path.parent) for path in sources(package))
    assert {folder: count for folder, count in counts.items() if count > 12} == {}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


# Maximum lines of a file; the first pattern that matches a file counts.
BUDGETS = {
    "infer/steps/step.py": 300,
    "models/heads/*.py": 200,
    "models/targets/gemma3.py": 150,
    "models/targets/qwen*.py": 150,
    "*.py": 500,
}


def test_files_stay_within_their_budgets() -> None:
    left = {relative(path): lines_of(path) for path in sources(*PRODUCT)}
    for pattern, most in BUDGETS.items():
        files = {name: left.pop(name) for name in fnmatch.filter(left, pattern)}
        assert files, pattern
        assert {name: lines for name, lines in files.items() if lines > most} == {}


MOST_SPINE_LINES = 3_898  # 3,850 are meant; without infer/kvcache/{states,hybrid}.py
# 50,500 are meant; this is what stands: lower it
MOST_PRODUCT_LINES = 56_512
HYBRIDS = (  # what hybrid targets cost beside the rest: recurrent kernels, mixers, states, targets, their GGUF files
    *("kernels/recurren*.py", "kernels/triton/recurrence.py", "models/recurrence.py", "models/mixers/*.py"),
    *("infer/kvcache/states.py", "infer/kvcache/hybrid.py", "models/gguf/hybrid.py", "models/gguf/mamba2.py"),
    *(f"models/targets/{name}.py" for name in ("lfm2", "qwen3_5", "qwen3_next", "falcon_h1", "nemotron_h")),
    *("models/targets/granite_hybrid.py", "infer/speculation/proposers/hybrid_draft_model.py"),
)
MOST_HYBRID_LINES = 2_766
PROOF = ("scripts/prove.py", "scripts/proof/*.py", "scripts/chaos.py", "scripts/faults/*.py")
MOST_PROOF_LINES = 2_591


def test_the_engine_stays_small() -> None:
    """Engine, steps, KV cache, speculation without its proposers, their data: what one reads to change a step."""
    folders = ("engine", "steps", "kvcache", "speculation")
    files = [path for path in sources(*(f"infer/{name}" for name in folders)) if "proposers" not in path.parts]
    files += [ROOT / f"infer/batch/{name}.py" for name in ("tree", "history")]
    assert sum(lines_of(path) for path in files if not of_hybrids(path)) <= MOST_SPINE_LINES


def test_the_product_stays_small() -> None:
    lines: dict[tuple[bool, bool], int] = Counter()
    for path in sources(*PRODUCT):
        lines[of_hybrids(path), among(path, PROOF)] += lines_of(path)
    assert lines[False, False] <= MOST_PRODUCT_LINES
    assert 0 < lines[True, False] <= MOST_HYBRID_LINES
    assert 0 < lines[False, True] <= MOST_PROOF_LINES


def among(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(relative(path), pattern) for pattern in patterns)


def of_hybrids(path: Path) -> bool:
    return among(path, HYBRIDS)


@pytest.mark.parametrize(
    ("package", "upward"),
    [("infer", set()), ("train", {("data", "distributed"), ("data", "features"), ("data", "planning")})],
)
def test_rooms_are_in_one_order(package: str, upward: set[tuple[str, str]]) -> None:
    """Folders of a package, and modules at its root, import each other in one direction, but for those named here."""
    graph: dict[str, set[str]] = {}
    names = {module_of(path): path for path in sources(package)}
    for path in sources(package):
        if room := module_of(path).split(".")[1:2]:
            imported = (name.split(".")[1:2] for name in imported_modules_of(path, names=names))
            graph.setdefault(*room, set()).update(*imported)
    for room, other in upward:
        graph[room].remove(other)  # a KeyError: it is no longer imported, so take it out of the list
    for room, imported in graph.items():
        imported.discard(room)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_file_beside_an_entry_point_shadows_a_module() -> None:
    """Python puts an entry point's own folder first on sys.path."""
    our_packages = {"kernels", "models", "infer", "train", "scripts", "tests"}
    taken = set(sys.stdlib_module_names) | (set(metadata.packages_distributions()) - our_packages) | FOREIGN
    names = {
        f"{folder}/{path.name}": path.stem
        for folder in ("train", "infer", "scripts")
        for path in (ROOT / folder).iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }
    assert {file: name for file, name in names.items() if name in taken} == {}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_resolve_to_this_repository(package: str) -> None:
    module = importlib.import_module(package)
    assert [Path(folder).resolve() for folder in module.__path__] == [ROOT / package]


def test_hugging_face_kernels_is_not_installed() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("kernels")


def entry_points() -> list[str]:
    scripts = [relative(path) for path in sources("scripts") if "__main__" in path.read_text(encoding="utf-8")]
    return sorted({*ENTRY_POINTS, *scripts})


@pytest.mark.parametrize("file", entry_points())
def test_entry_points_begin_with_the_bootstrap(file: str) -> None:
    body = parse(ROOT / file).body
    if isinstance(body[0], ast.Expr):
        body = body[1:]  # the docstring
    if isinstance(body[0], ast.ImportFrom) and body[0].module == "__future__":
        body = body[1:]
    assert "\n".join(ast.unparse(node) for node in body[:4]) == BOOTSTRAP
    assert ast.unparse(body[4]) == "import infer.options.environment"


def test_bootstrap_replaces_the_own_folder(tmp_path: Path) -> None:
    """A script started from elsewhere, next to a file that shadows the standard library, still finds the repository."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "queue.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("where = 'the right one'\n")
    (folder / "run.py").write_text(f"{BOOTSTRAP}\nimport queue, kernels\nprint(kernels.where)\n")
    command = [sys.executable, str(folder / "run.py")]
    environment = {**os.environ, "PYTHONSAFEPATH": ""}
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, env=environment, check=False)
    assert (result.stdout, result.stderr) == ("the right one\n", "")


def forbidden(tree: ast.Module) -> list[str]:
    violations = [name for name in imported_modules(tree) if name.split(".")[0] in FORBIDDEN_IMPORTS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            violations.append("torch.load")
        if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            violations.append(node.id)
        if isinstance(node, ast.Name | ast.Attribute) and PICKLING.search(ast.unparse(node)):
            violations.append(ast.unparse(node))
        unsafe = isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle")
        if unsafe and ast.unparse(node.value) != "False":
            violations.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and node.value == "_target_":
            violations.append("_target_")
    return violations


def test_no_code_from_data() -> None:
    """No pickle, no remote code, no class names in a configuration; one place reads a pickle's tensors."""
    violations = {relative(path): names for path in sources(*PRODUCT) if (names := forbidden(parse(path)))}
    assert violations == {"models/formats/files.py": ["torch.load"]}
    tree = parse(ROOT / "models/formats/files.py")
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load")
    assert "weights_only=True" in [ast.unparse(keyword) for keyword in call.keywords]
    assert [relative(path) for path in (ROOT / "conf").rglob("*.yaml") if "_target_" in path.read_text()] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "def f():\n    import pickle.foo",
        "torch.load(f)",
        "f(trust_remote_code=True)",
        "np.load(f, allow_pickle=x)",
        "x = '_target_'",
        "eval('1')",
        "dist.all_gather_object(a, b)",
        "broadcast_object_list([x])",
    ],
)
def test_the_search_for_code_from_data_finds_it(code: str) -> None:
    assert forbidden(ast.parse(code)) != []


def test_no_paths_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:" + "|".join(["work", "root", "home"]) + r")/\w")
    files = [
        *sources(*PRODUCT, "tests"),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "conf").rglob("*.yaml"),
        *ROOT.glob("scripts/*.sh"),
    ]
    assert [relative(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []
