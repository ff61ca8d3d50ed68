"""Atomic writes of files and folders: written beside their destination, flushed to disk, then moved.

A kill, a full disk or a power cut leaves the previous content. Several runs, on several machines, may write into one
folder: names of unfinished files contain the writing process, and no other live process removes them. Independent of
the content of the files.
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
FORGOTTEN_S = 24 * 3600  # age at which an unfinished file of an unreachable process is removed
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which atomically replaces `folder` if the block succeeds.

    Raises ValueError naming the path and the bytes if the disk is full; `folder` is then unchanged.
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
        discard(staging)  # after a swap this is the previous content


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
    """Return the temporary path at which this process writes `path`."""
    return path.with_name(f".{path.name}.{host_id()}-{os.getpid()}{mark}.tmp")


def host_id() -> str:
    """Return an id of the PID namespace, i.e. of machine and container, within which a PID identifies a process."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def sweep(folder: Path) -> None:
    """Remove unfinished files of killed processes from `folder`, but none that a process may still be writing."""
    for path in folder.glob(".*.tmp"):
        if is_left(path):
            with suppress(FileNotFoundError):  # another run sweeps too
                discard(path)


def is_left(path: Path) -> bool:
    """Return whether its writer is gone: the process has ended, or runs elsewhere and has not touched it for long."""
    name = UNFINISHED.search(path.name)
    if name is not None and name["place"] == host_id():
        return not is_alive(int(name["process"]))
    try:
        touched = max(part.stat().st_mtime for part in [path, *path.rglob("*")])
    except FileNotFoundError:  # it was finished just now
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
    """Convert all kinds of full-disk errors into one ValueError, and remove the unfinished `staging`, if any."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        partial = staging or path
        written = sum(file.stat().st_size for file in [partial, *partial.rglob("*")] if file.is_file())
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
    """Move `new` to `old`; the previous content of `old` is afterwards at `new`."""
    if not old.exists():
        os.rename(new, old)
    elif not _exchange(new, old):
        aside = unfinished(old, ".old")
        os.rename(old, aside)
        os.rename(new, old)
        os.rename(aside, new)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically, as Linux can; return False if the system or the file system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))
