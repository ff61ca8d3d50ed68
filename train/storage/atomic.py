"""Files and folders that are whole or not there: written beside their place, flushed to disk, then moved.

A kill, a full disk or a power cut leaves what was there before. Several runs, on several machines, may write into one
folder: what is unfinished bears the name of who writes it, and nobody else removes it. Knows nothing about what the
files hold.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

AT_FDCWD, RENAME_EXCHANGE = -100, 2
UNFINISHED = re.compile(r"\.(?P<place>[0-9a-f]{8})-(?P<process>\d+)(\.old)?\.tmp$")
FORGOTTEN_S = 24 * 3600  # unfinished and untouched for so long, of a process that cannot be asked
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; when the block ends well it takes the place of `folder`, at once.

    Raises ValueError naming the path and the bytes when the disk cannot take it; `folder` is then as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = unfinished(folder)
    discard(staging)
    staging.mkdir()
    try:
        with refuse_full_disk(folder, staging):
            yield staging
            for path in staging.rglob("*"):
                flush(path)
            flush(staging)
            swap(staging, folder)
            flush(folder.parent)
    finally:
        discard(staging)  # what was there before, after a swap


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    staging = unfinished(path)
    with refuse_full_disk(path, staging):
        staging.write_bytes(content)
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    staging = unfinished(path)
    with refuse_full_disk(path, staging):
        save_file(dict(tensors), staging)
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def copy_file(source: Path, path: Path) -> None:
    staging = unfinished(path)
    with refuse_full_disk(path, staging):
        shutil.copyfile(source, staging)
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def unfinished(path: Path, mark: str = "") -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{this_place()}-{os.getpid()}{mark}.tmp")


def this_place() -> str:
    """Where a process's number means that process: on this machine, in this container."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def sweep(folder: Path) -> None:
    """Removes what a killed process left unfinished in `folder`, and nothing that another one may still be writing."""
    for path in folder.glob(".*.tmp"):
        if is_left(path):
            with suppress(FileNotFoundError):  # another run sweeps too
                discard(path)


def is_left(path: Path) -> bool:
    """Whether nobody writes it any more: its process is gone, or ran elsewhere and has not touched it for long."""
    name = UNFINISHED.search(path.name)
    if name is not None and name["place"] == this_place():
        return not is_alive(int(name["process"]))
    try:
        touched = max(part.stat().st_mtime for part in [path, *path.rglob("*")])
    except FileNotFoundError:  # it has just been finished
        return False
    return time.time() - touched > FORGOTTEN_S


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@contextmanager
def refuse_full_disk(path: Path, staging: Path | None = None) -> Iterator[None]:
    """Turns "no room" in any of its shapes into one ValueError, and removes the unfinished `staging`, if any."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        begun = staging or path
        written = sum(file.stat().st_size for file in [begun, *begun.rglob("*")] if file.is_file())
        if staging is not None:
            discard(staging)
        code = error.errno if isinstance(error, OSError) else None
        if code not in NO_ROOM and not any(f"os error {number}" in str(error) for number in NO_ROOM):
            raise
        free = shutil.disk_usage(path.parent).free
        raise ValueError(
            f"{path}: no room to write it: stopped after {written} bytes, {free} bytes are free ({error}). "
            "What was there before is untouched; free some space and run the same command again"
        ) from error


def discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap(new: Path, old: Path) -> None:
    """Puts `new` in the place of `old`; what `old` held is afterwards at `new`."""
    if not old.exists():
        os.rename(new, old)
    elif not _exchange(new, old):
        aside = unfinished(old, ".old")
        os.rename(old, aside)
        os.rename(new, old)
        os.rename(aside, new)


def _exchange(one: Path, other: Path) -> bool:
    """Linux swaps two names in one operation; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))
