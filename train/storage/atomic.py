"""Atomic writes of files and folders: written beside their destination, flushed to disk, then moved.

A kill, a full disk or a power cut leaves the previous content. Several runs may write into one folder: a writer locks
what it has not finished, and a lock ends with its process, so that `sweep` removes only what nobody writes any more. On
a file system without locks nothing is swept. Independent of the content of the files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_folder(folder: Path, finish: Callable[[Path], Path] | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill, which atomically replaces `folder` if the block succeeds.

    `finish` gets what was filled, may add to it, and returns what it replaces instead: nobody else who has a `finish`
    replaces anything beside `folder` meanwhile. Raises ValueError naming the path and the bytes if the disk is full;
    `folder` is then unchanged.
    """
    make_folder(folder.parent)
    with staging_for(folder) as staging, ExitStack() as stack:
        yield staging
        if finish is not None:
            stack.enter_context(lock(folder.parent, wait=True))
            folder = finish(staging)
        for path in staging.rglob("*"):
            flush(path)
        flush(staging)
        swap(staging, folder)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which atomically replaces `path` if the block succeeds; errors as above."""
    with staging_for(path) as staging:
        yield staging / path.name
        flush(staging / path.name)
        os.replace(staging / path.name, path)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with replace_file(path) as staging:
        staging.write_bytes(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with replace_file(path) as staging:
        save_file(dict(tensors), staging)


@contextmanager
def staging_for(path: Path) -> Iterator[Path]:
    """Yield a new, locked folder beside `path`, removed afterwards with what is then in it. Raises as for a folder."""
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    make_folder(staging, parents=False)
    try:
        with refuse_full_disk(path, staging), lock(staging):
            yield staging
            flush(path.parent)
    finally:
        discard(staging)


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file or folder within the block, if the file system can; the value says whether it could.

    Raises BlockingIOError if it is locked already, by another process or by this one, unless it is to `wait`.
    """
    descriptor, locked = os.open(path, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # of a file system without locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove unfinished files of ended processes from `folder`, but none that a process is still writing."""
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError, BlockingIOError), lock(path) as locked:  # another run sweeps too
            if locked:
                discard(path)


@contextmanager
def refuse_full_disk(path: Path, staging: Path | None = None) -> Iterator[None]:
    """Convert all kinds of full-disk errors into one ValueError. `staging`: where `path` is written first, if it is."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        partial = staging or path
        written = sum(file.stat().st_size for file in [partial, *partial.rglob("*")] if file.is_file())
        code = error.errno if isinstance(error, OSError) else None
        if code not in NO_ROOM and not any(f"os error {number}" in str(error) for number in NO_ROOM):
            raise
        free = shutil.disk_usage(path.parent).free
        raise ValueError(
            f"{path}: no room to write it: stopped after {written} bytes, {free} bytes are free ({error}). "
            "What was there before is untouched; free some space and run the same command again"
        ) from error


def make_folder(folder: Path, *, parents: bool = True) -> None:
    """Create a folder if it is not there. Raises ValueError if it cannot be written."""
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path}: cannot be written ({error.strerror or error}); give another path")


def free_disk(path: Path) -> tuple[Path, int]:
    """Return the nearest place at or above `path` that exists, and the bytes that are free there.

    Raises ValueError if no folder can be made there, whatever its permissions and free bytes say.
    """
    try:
        place = next(place for place in (path, *path.parents) if place.exists())
        tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=place).cleanup()
    except OSError as error:
        raise unwritable(path, error) from error
    return place, shutil.disk_usage(place).free


def discard(path: Path) -> None:
    if path.is_dir():
        with suppress(FileNotFoundError):  # another process discards it too
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
        aside = old.with_name(f".{old.name}.old")  # not swept: after a kill between the two moves it is all there is
        discard(aside)
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
