"""The user's cache folder: compiled kernels, measured costs, fetched models. One that cannot be written is no error.

HEADWAY_CACHE names the folder, else it is $XDG_CACHE_HOME/headway or ~/.cache/headway. If it cannot be written (a
container's user without a home folder, a read-only disk), what is in it is read, and what is new goes to the user's own
folder among the temporary files, after one warning. A file that was cut, by a full disk or a process that was killed,
is as good as missing: who reads it finds out, by its size, hash or syntax, and makes it anew.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

VARIABLE = "HEADWAY_CACHE"
log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the user's cache folder, which may be missing, and may be impossible to make."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headway"


def cache_file(name: str, is_whole: Callable[[Path], bool] = os.path.isfile) -> Path:
    """Return the place of a file of the cache: where it is, and whole, or where it can be written."""
    place = cache_folder() / name
    return place if is_whole(place) else writable_folder() / name


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Yield a file to write in a folder that is removed afterwards; unless the block raises, the file moves to `path`.

    It is on the disk before it moves, so `path` is whole whenever it exists, and several processes may write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
        part = Path(folder) / path.name
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)


def writable_folder() -> Path:
    """Return the cache folder, or the temporary one in its place."""
    folder = cache_folder()
    return folder if can_write(folder) else temporary_folder(folder)


def can_write(folder: Path) -> bool:
    """Return whether files can be made in the folder, or the folder itself: by trying, as permissions do not tell."""
    if folder.parts[:1] == ("~",):
        return False  # there is no home folder
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def temporary_folder(unwritable: Path) -> Path:
    """Return the folder in place of one that cannot be written, with a warning; if there is none either, the latter."""
    try:
        folder = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
        if not _is_private(folder):  # somebody else made it
            folder = Path(tempfile.mkdtemp(prefix="headway-"))
    except OSError:
        return unwritable
    log.warning(
        "warning: %s cannot be written: kernels, measured costs and models that would be kept there go to %s; "
        "XDG_CACHE_HOME or %s names another folder",
        unwritable,
        folder,
        VARIABLE,
    )
    return folder


def _is_private(folder: Path) -> bool:
    """Return whether the folder, made if it is missing, belongs to this user, and no other can write to it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def redirect_libraries() -> None:
    """Let the libraries that keep a cache in the home folder use ours where theirs cannot be written.

    They read the environment when they are imported: call this before. What the user has set stays, and models and
    settings are read where they are. Processes that this one starts use the same folders.
    """
    if os.path.expanduser("~") == "~":  # no HOME, and a user whom the machine's list of users lacks
        os.environ["HOME"] = str(writable_folder())
    home = Path(os.path.expanduser("~"))
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    for variable, folder, is_read in (
        (VARIABLE, cache_folder(), True),
        ("HF_HOME", caches / "huggingface", True),
        ("TRITON_CACHE_DIR", Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache", False),
        ("MPLCONFIGDIR", settings / "matplotlib", True),
        ("WANDB_CACHE_DIR", caches / "wandb", False),
        ("WANDB_CONFIG_DIR", settings / "wandb", True),
    ):
        if variable not in os.environ and not (is_read and os.path.isdir(folder)) and not can_write(folder):
            os.environ[variable] = str(writable_folder() / variable.lower())
    hub = Path(os.environ.get("HF_HOME") or caches / "huggingface") / "hub"
    if "HF_HUB_CACHE" not in os.environ and os.path.isdir(hub) and not can_write(hub):
        os.environ["HF_HUB_CACHE"] = str(_with_links(hub, writable_folder() / "hub"))


def _with_links(folder: Path, place: Path) -> Path:
    """Make `place` a folder of links to what `folder` holds, so that it can be read, and more be written beside it."""
    with suppress(OSError):  # then what fails is reported by those who read it
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        for entry in folder.iterdir():
            if not entry.name.startswith(".") and not os.path.lexists(place / entry.name):
                (place / entry.name).symlink_to(entry)
    return place
