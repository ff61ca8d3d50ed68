"""Files and folders that are whole or not there: written beside their place, flushed to disk, then moved.

A kill, a full disk or a power cut leaves what was there before. Knows nothing about what the files hold.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; when the block ends well it takes the place of `folder`, at once.

    Raises ValueError naming the path and the bytes when the disk cannot take it; `folder` is then as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
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
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refuse_full_disk(path, staging):
        staging.write_text(text, encoding="utf-8")
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refuse_full_disk(path, staging):
        save_file(dict(tensors), staging)
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def copy_file(source: Path, path: Path) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refuse_full_disk(path, staging):
        shutil.copyfile(source, staging)
        flush(staging)
        os.replace(staging, path)
        flush(path.parent)


def sweep(folder: Path) -> None:
    """Removes what a killed process left unfinished in `folder`."""
    for path in folder.glob(".*.tmp"):
        discard(path)


@contextmanager
def refuse_full_disk(path: Path, staging: Path) -> Iterator[None]:
    """Turns "no room" in any of its shapes into one ValueError, and removes the unfinished `staging`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        written = sum(file.stat().st_size for file in [staging, *staging.rglob("*")] if file.is_file())
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
        aside = new.with_name(f".{old.name}.{os.getpid()}.old.tmp")
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
