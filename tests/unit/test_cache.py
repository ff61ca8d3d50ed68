"""Machines whose cache folder cannot be written: every command starts, with one warning that says what to set."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.settings.paths import resolve_path
from kernels import cache
from kernels.cache import VARIABLE, cache_file, can_write, placed
from kernels.cpu.library import compiler, is_whole, library, library_file
from models.checks import home_path
from tests.forking import Run
from tests.server import patient

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 54321  # a user whom the machine's list of users lacks
TRAINING = (  # with W&B and plots, which write to the home folder as well
    *("head=eagle3", "head.draft_vocab_size=128", "data=demo", "data.num_sequences=8", "data.max_new_tokens=12"),
    *("data.prompt_tokens=8", "sequence_length=24", "batch_size=4", "minutes=null", "eval_every=100", "eval_prompts=2"),
    *("steps=2", "eval_max_tokens=12", "engine.max_tokens_in_cache=1024", "precision=fp32"),
    *("tracker=wandb", "model.name=tiny"),
)
IN_HOME = ("HOME", "XDG_CACHE_HOME", VARIABLE, "HF_HOME", "TRITON_CACHE_DIR", "USER", "LOGNAME")


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that every user can read, for temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def environment(place: Path, **chosen: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in IN_HOME}
    return {**kept, "TMPDIR": str(place), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **chosen}


def warnings_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "cannot be written" in line]


def run(place: Path, command: list[str], text: str = "", **chosen: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(place, **chosen), input=text, capture_output=True, text=True, check=False
    )


def as_nobody(*words: str) -> list[str]:
    """Return a command that runs as NOBODY, in a user namespace, which keeps the rights to this checkout."""
    command = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this machine makes no user namespaces")
    return [*command, sys.executable, *words]


def quick_compiler(place: Path) -> Path:
    """Return this machine's compiler, but one that optimises little: the kernels take it a third of the time."""
    script = place / "cc"
    script.write_text(f'#!/bin/sh\nexec {compiler() or "cc"} "$@" -O1\n')
    script.chmod(0o755)
    return script


def test_a_user_without_a_home_folder_is_served(tiny_target_folder: Path, place: Path) -> None:
    command = as_nobody(
        "infer/serve.py", f"model={tiny_target_folder}", "model.name=tiny", "head=none", "server.port=0"
    )
    log = place / "log"
    with log.open("w") as out:
        variables = environment(place, CC=str(quick_compiler(place)))
        server = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=out)
    try:
        while not (match := re.search(r"open (http\S+)/ in a browser", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        body = {"model": "tiny", "prompt": "def f(", "max_tokens": 4}
        assert patient.post(f"{match[1]}/v1/completions", json=body).status_code == 200
    finally:
        server.terminate()
        assert server.wait() == 0
    (warning,) = warnings_of(log.read_text())
    assert f"{place}/headway-{NOBODY}" in warning
    assert "XDG_CACHE_HOME or HEADWAY_CACHE" in warning
    assert list((place / f"headway-{NOBODY}").rglob("kernels-*.so"))


@pytest.mark.parametrize(
    ("home", "script", "words"),
    [
        (
            "/proc",
            "infer/generate.py",
            ("prompt=def f(", "chat=false", "max_tokens=4", "proposer.adaptive=true", "head=none"),
        ),
        ("none", "infer/chat.py", ("max_tokens=4", "head=none")),
        ("none", "train/run.py", TRAINING),
        ("/proc", "scripts/doctor.py", ("--json",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cache_that_cannot_be_written_ends_no_command(
    home: str, script: str, words: tuple[str, ...], tiny_target_folder: Path, place: Path, forked: Run
) -> None:
    arguments = [script, *([] if script == "scripts/doctor.py" else [f"model={tiny_target_folder}"]), *words]
    arguments += [f"output_dir={place}"] if script == "train/run.py" else []
    if home == "none":
        result = run(place, as_nobody(*arguments), text="hello\n", HEADWAY_CPU_KERNELS="torch")  # compiling takes time
    else:
        result = forked(arguments, env=environment(place, HOME=home, HEADWAY_CPU_KERNELS="torch"), input="hello\n")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert len(warnings_of(result.stderr)) == 1
    assert "/proc" not in result.stderr.replace(warnings_of(result.stderr)[0], "")  # no library warns as well
    if script == "scripts/doctor.py":
        (check,) = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "cache"]
        assert (check["status"], VARIABLE in check["fix"]) == ("warning", True)


COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && exec {cc} --version
for last; do :; done
cp {library} "$last"
"""  # compiles in no time what {cc} has compiled before


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize(("left", "writable"), [(0, True), (4096, True), (-1, False)])
def test_a_library_that_was_cut_is_built_anew(left: int, writable: bool, place: Path) -> None:
    """The loader maps a file by what its header says, and touching what was cut ends the process."""
    built, home = library_file(str(compiler())), place / "home"
    shutil.copy(built, place / "whole.so")
    (place / "cc").write_text(COMPILER.format(cc=compiler(), library=place / "whole.so"))
    (place / "cc").chmod(0o755)
    stored = home / built.name
    home.mkdir()
    stored.write_bytes(built.read_bytes()[:left])
    home.chmod(0o755 if writable else 0o555)
    code = "from kernels.cpu.library import *; assert library().linear_tiles; print(library_file(compiler()))"
    command = [sys.executable, "-c", code] if writable else as_nobody("-c", code)
    inodes = set[int]()
    for _ in range(2):
        result = run(place, command, HEADWAY_CACHE=str(home), CC=str(place / "cc"))
        assert result.returncode == 0, result.stderr
        found = Path(result.stdout.strip())
        assert is_whole(found)
        assert (found == stored) == writable
        inodes.add(found.stat().st_ino)
    assert len(inodes) == 1, "built once"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = tmp_path / "new" / "file", list[bytes]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.pread(descriptor, 9, 0)))
    with placed(path) as part:
        part.write_text("content")
        assert not path.exists()
    assert (path.read_text(), flushed) == ("content", [b"content"])
    with pytest.raises(FileNotFoundError), placed(path):
        pass
    assert [each.read_text() for each in path.parent.iterdir()] == ["content"]


def test_models_of_a_read_only_hub_cache_are_served(tiny_target_folder: Path, place: Path) -> None:
    home = place / "home"
    stored = home / ".cache" / "huggingface" / "hub" / "models--owner--tiny"
    shutil.copytree(tiny_target_folder, stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    for folder in (stored.parent, *stored.parents[1:4]):
        folder.chmod(0o555)
    words = "infer/generate.py", "model=owner/tiny", "prompt=def f(", "chat=false", "max_tokens=4", "head=none"
    chosen = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "HEADWAY_CPU_KERNELS": "torch"}
    result = run(place, as_nobody(*words), **chosen)
    for folder in (stored.parent, *stored.parents[1:4]):
        folder.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert len(warnings_of(result.stderr)) == 1
    (link,) = (place / f"headway-{NOBODY}").rglob("models--owner--tiny")
    assert link.resolve() == stored


def test_the_default_model_goes_to_the_temporary_folder(place: Path) -> None:
    result = run(place, [sys.executable, "infer/serve.py"], HOME="/proc", PIP_NO_INDEX="1")
    assert result.returncode == 2  # there is no index to fetch it from
    (warning,) = warnings_of(result.stderr)
    assert "XDG_CACHE_HOME" in warning
    assert VARIABLE in warning
    assert f"to {place}/headway-{os.getuid()}/" in result.stderr
    assert "Errno" not in result.stderr


def test_what_lies_in_a_cache_that_cannot_be_written_is_read(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv(VARIABLE, "/proc")
    assert cache_file("cpuinfo") == Path("/proc/cpuinfo")
    assert not can_write(Path("/proc"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    cache.temporary_folder.cache_clear()
    assert cache_file("none") == place / f"headway-{os.getuid()}" / "none"
    cache.temporary_folder.cache_clear()


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_no_folder_that_others_could_have_made_is_used(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path, kind: str
) -> None:
    """Libraries are loaded from it."""
    folder = place / f"headway-{os.getuid()}"
    if kind == "link":
        folder.symlink_to(tmp_path)
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    monkeypatch.setenv(VARIABLE, "/proc")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    cache.temporary_folder.cache_clear()
    used = cache_file("kernels.so").parent
    cache.temporary_folder.cache_clear()
    assert used.parent == place
    assert used != folder
    assert used.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("convert", [home_path, resolve_path])
def test_the_home_folder_of_nobody_is_an_error_for_people(convert) -> None:
    with pytest.raises(ValueError, match=r"~nobody-here/model: ~nobody-here is no user with a home folder"):
        convert("~nobody-here/model")
