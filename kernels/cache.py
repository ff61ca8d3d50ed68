"""The user's cache folder: compiled kernels, measured costs, fetched models. One that cannot be written is no error.

HEADWAY_CACHE names the folder, else it is $XDG_CACHE_HOME/headway or ~/.cache/headway. If it cannot be written (a
container's user without a home folder, a read-only disk), what is in it is read, and what is new goes to the user's own
folder among the temporary files, after one warning.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

VARIABLE = "HEADWAY_CACHE"
log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the user's cache folder, which may be missing, and may be impossible to make."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headway"


def cache_file(name: str) -> Path:
    """Return the place of a file of the cache: where it is, or where it can be written."""
    folder = cache_folder()
    return (folder if os.path.isfile(folder / name) else writable_folder()) / name


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

    They read the environment when they are imported: call this before. What the user has set stays, and a cache of
    models that exists is read where it is. Processes that this one starts use the same folders.
    """
    if os.path.expanduser("~") == "~":  # no HOME, and a user whom the machine's list of users lacks
        os.environ["HOME"] = str(writable_folder())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    triton = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    for variable, folder, is_read in (
        (VARIABLE, cache_folder(), True),
        ("HF_HOME", caches / "huggingface", True),
        ("TRITON_CACHE_DIR", triton, False),
    ):
        if variable not in os.environ and not (is_read and os.path.isdir(folder)) and not can_write(folder):
            os.environ[variable] = str(writable_folder() / variable.partition("_")[0].lower())
