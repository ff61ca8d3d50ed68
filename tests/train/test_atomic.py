"""Files and folders are written completely or not at all, whatever happens during the write."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import full_disk
from tests.train.launching import ROOT
from train.storage import atomic


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    with atomic.replace_folder(tmp_path / "deep" / "x") as staging:
        (staging / "a").write_text("1")
        assert not (tmp_path / "deep" / "x").exists()
    assert content(tmp_path / "deep" / "x") == {"a": "1"}
    assert names(tmp_path / "deep") == {"x"}


def test_an_old_folder_is_replaced_and_nothing_of_it_stays(tmp_path: Path) -> None:
    for text in ("1", "2"):
        with atomic.replace_folder(tmp_path / "x") as staging:
            (staging / f"file{text}").write_text(text)
    assert content(tmp_path / "x") == {"file2": "2"}
    assert names(tmp_path) == {"x"}


def test_where_names_cannot_be_exchanged_two_moves_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    (tmp_path / ".x.old").mkdir()  # of a kill between two moves
    (tmp_path / ".x.old" / "a").touch()
    test_an_old_folder_is_replaced_and_nothing_of_it_stays(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_linux_exchanges_in_one_operation(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == ({"b"}, {"a"})


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    with atomic.replace_folder(tmp_path / "x") as staging:
        (staging / "a").write_text("1")

    def fail() -> None:
        with atomic.replace_folder(tmp_path / "x") as staging:
            (staging / "a").write_text("2")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert content(tmp_path / "x") == {"a": "1"}
    assert names(tmp_path) == {"x"}


def test_a_full_disk_is_one_clear_error_and_the_old_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "a").write_text("old")

    def write() -> None:
        with full_disk(4096), atomic.replace_folder(folder) as staging:
            (staging / "a").write_text("new")
            (staging / "b").write_bytes(bytes(9000))

    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared below
        write()
    assert str(error.value).startswith(f"{folder}: no room to write it: stopped after 4099 bytes, ")
    assert "bytes are free" in str(error.value)
    assert "What was there before is untouched" in str(error.value)
    assert content(folder) == {"a": "old"}
    assert names(tmp_path) == {"x"}


def test_a_full_disk_under_safetensors_too(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    atomic.write_tensors(path, {"a": torch.ones(3)})
    with full_disk(4096), pytest.raises(ValueError, match=r"x.safetensors: no room to write it"):
        atomic.write_tensors(path, {"a": torch.zeros(100_000)})
    assert load_file(path)["a"].tolist() == [1.0, 1.0, 1.0]
    assert names(tmp_path) == {"x.safetensors"}


def test_other_errors_keep_their_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic.replace_folder(tmp_path / "x") as staging:
        (staging / "none" / "a").write_text("1")
    assert names(tmp_path) == set()


WRITE = """
import os, sys, time
from pathlib import Path
from train.storage import atomic

with atomic.replace_folder(Path(sys.argv[1]) / "x") as staging:
    print(staging.name, flush=True)
    time.sleep(600)
"""


def test_sweep_removes_what_a_kill_left_and_nothing_that_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "z").touch()
    (tmp_path / ".y.01234567-2.tmp").touch()  # as earlier versions named them
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        living = process.stdout.readline().strip()
        atomic.sweep(tmp_path)
        assert names(tmp_path) == {"z", living}
        process.kill()
    atomic.sweep(tmp_path)
    assert names(tmp_path) == {"z"}


def test_without_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic.fcntl, "flock", flock)
    (tmp_path / ".x.0123abcd.tmp").touch()
    atomic.sweep(tmp_path)
    atomic.write_text(tmp_path / "z", "1")
    assert names(tmp_path) == {".x.0123abcd.tmp", "z"}


def test_another_run_may_sweep_while_this_one_writes(tmp_path: Path) -> None:
    sweep = f"from pathlib import Path; from train.storage import atomic; atomic.sweep(Path({str(tmp_path)!r}))"
    with atomic.replace_folder(tmp_path / "x") as staging:
        (staging / "a").write_text("1")
        subprocess.run([sys.executable, "-c", sweep], check=True, cwd=ROOT)
    assert content(tmp_path / "x") == {"a": "1"}
