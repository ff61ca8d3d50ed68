"""A test that compiles for other machines is run again when anything that it compiles has changed, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import unchanged
from tests.unchanged import SWITCH, Unchanged

TESTS = """
import pathlib, pytest

@pytest.fixture(scope="module")
def built():
    pathlib.Path("runs").open("a").write("x")

@pytest.mark.sources("kernel.c")
@pytest.mark.parametrize("part", [1, 2])
def test_marked(built, part):
    assert "wrong" not in pathlib.Path("kernel.c").read_text()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs TESTS in a pytest of their own and returns how often their fixture was built."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "pytest.ini").write_text("[pytest]\nmarkers = sources\n")
    (root / "kernel.c").write_text("int one;")
    (root / "test_marked.py").write_text(TESTS)
    for name in (SWITCH, "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(root)

    def counted() -> int:
        runs = root / "runs"
        runs.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib"]
        pytest.main([*options, str(root)], plugins=[Unchanged(root)])
        return len(runs.read_text()) if runs.exists() else 0

    counted.root = root
    return counted


def test_what_passed_is_run_again_when_its_sources_change(run) -> None:
    assert run() == 1
    assert run() == 0
    (run.root / "other.c").write_text("int other;")
    assert run() == 0
    (run.root / "kernel.c").write_text("int two;")
    assert run() == 1
    (run.root / "kernel.c").write_text("int one;")  # another checkout's sources, which passed
    assert run() == 0
    (run.root / "test_marked.py").write_text(TESTS + "\n")
    assert run() == 1


def test_what_failed_is_run_again(run) -> None:
    (run.root / "kernel.c").write_text("wrong")
    assert run() == 1
    assert run() == 1


@pytest.mark.parametrize("name", [SWITCH, "CI"])
def test_a_switch_and_ci_run_everything(run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == 1
    monkeypatch.setenv(name, "1")
    assert run() == 1
    monkeypatch.setenv(name, "0")
    assert run() == 0


def test_another_compiler_or_level_of_processor_runs_it_again(run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == 1
    monkeypatch.setenv("HEADWAY_CPU_LEVEL", "baseline")
    assert run() == 1
    monkeypatch.delenv("HEADWAY_CPU_LEVEL")
    assert run() == 0
    monkeypatch.setattr(unchanged, "tools", lambda: "gcc 99")
    assert run() == 1


def test_a_source_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names 'kernels/gone\.c'"):
        unchanged.digest(tmp_path, tmp_path / "test_none.py", ("kernels/gone.c",))


def test_what_a_tests_file_imports_counts_wherever_it_stands(tmp_path: Path) -> None:
    """Modules and packages on the way, from the file and from what it imports; not what others import."""
    for name, text in {
        "test_it.py": "import a.b\ndef test():\n    from c import d, number\n    import torch",
        "conftest.py": "from e import *",
        "a/__init__.py": "", "a/b.py": "import f.g", "c/__init__.py": "number = 1", "c/d.py": "",
        "e.py": "", "f/g.py": "", "other.py": "import a",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(file.relative_to(tmp_path)) for file in unchanged.read_with(tmp_path, tmp_path / "test_it.py")}
    assert found == {
        *("test_it.py", "conftest.py", "a/__init__.py", "a/b.py", "c/__init__.py", "c/d.py", "e.py", "f/g.py")
    }
