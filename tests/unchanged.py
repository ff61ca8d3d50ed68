"""Skips what passed before with the same sources: tests of kernels for machines other than this one.

Such a test is marked with what it compiles or interprets, as files and folders of the repository:

    @pytest.mark.sources("kernels", "tests/kernels/triton/launches.py")

What its own file imports of the repository, the compilers' versions and this machine's processor count too. What has
passed is noted in the user's cache folder (kernels/cache.py). HEADWAY_COMPILE_ALL=1 runs everything, and so does a
machine that sets CI.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kernels.cache import writable_folder
from kernels.cpu.library import processor

SWITCH = "HEADWAY_COMPILE_ALL"
PROGRAMS = ("cc", "gcc", "clang", "aarch64-linux-gnu-gcc", "qemu-aarch64", "qemu-x86_64")
PACKAGES = ("torch", "triton", "numpy")
VARIABLES = ("CC", "HEADWAY_CPU_LEVEL", "HEADWAY_CPU_KERNELS", "HEADWAY_KERNELS", "TRITON_INTERPRET")
SUFFIXES = (".py", ".c", ".h", ".toml")


def runs_all() -> bool:
    return any(os.environ.get(name, "0") not in ("", "0", "false") for name in (SWITCH, "CI"))


@cache
def tools() -> str:
    """Return the versions of all that compiles or runs kernels here."""
    programs = [[path, "--version"] for name in PROGRAMS if (path := shutil.which(name))]
    said = [subprocess.run(command, capture_output=True, text=True, check=False).stdout for command in programs]
    return repr((platform.python_version(), processor(), said, [installed(package) for package in PACKAGES]))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def files(root: Path, sources: tuple[str, ...]) -> Iterator[Path]:
    """Yield the source files that `sources` name, in one order. Raises ValueError for a name that is none."""
    for name in sorted(set(sources)):
        place = root / name
        if not place.exists():
            raise ValueError(f"pytest.mark.sources names {name!r}, which {root} does not contain: correct the mark")
        yield from [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.suffix in SUFFIXES)


@cache
def imports(root: Path, file: Path) -> frozenset[Path]:
    """Return the files of the repository that a Python file names in its imports, wherever in it they stand."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = {root.joinpath(*name.split(".")) for name in names}
    packages = {parent / "__init__.py" for place in places for parent in (place, *place.parents)}
    files = packages | {place.with_suffix(".py") for place in places}
    return frozenset(file for file in files if file.is_relative_to(root) and file.is_file())


def read_with(root: Path, test: Path) -> set[Path]:
    """Return a test's file, the conftest.py beside it, and all that these import of the repository, and so on."""
    known, new = set[Path](), {file for file in (test, test.with_name("conftest.py")) if file.is_file()}
    while new:
        known |= new
        new = {each for file in new for each in imports(root, file)} - known
    return known


def digest(root: Path, test: Path, sources: tuple[str, ...]) -> str:
    """Return a hash of all that a test depends on: its own file, what this imports, and the `sources` of its mark."""
    hashed = hashlib.sha256(repr((tools(), [os.environ.get(name) for name in VARIABLES])).encode())
    for file in sorted(read_with(root, test).union(files(root, sources))):
        hashed.update(repr((str(file.relative_to(root)), file.read_bytes())).encode())
    return hashed.hexdigest()[:24]


class Unchanged:
    """The plugin. What passed is a line of the file of its digest, so that several checkouts may share a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = writable_folder() / "tests"  # now, because tests move the cache folder
        self._everything = runs_all()
        self._digest = cache(digest)

    def _note(self, item: pytest.Item) -> Path | None:
        marks = list(item.iter_markers("sources"))
        if not marks:
            return None
        sources = tuple(name for mark in marks for name in mark.args)
        return self._folder / f"passed-{self._digest(self._root, item.path, sources)}.txt"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        note = None if self._everything else self._note(item)
        if note is not None and note.is_file() and item.nodeid in note.read_text(encoding="utf-8").splitlines():
            pytest.skip(f"passed before with these sources and compilers; {SWITCH}=1 runs it")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if report.when == "call" and report.passed and (note := self._note(item)) is not None:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with note.open("a", encoding="utf-8") as file:  # a short line is written at once, whoever else writes
                file.write(f"{item.nodeid}\n")
        return report
