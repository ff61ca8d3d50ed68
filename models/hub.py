"""Targets and heads from the model hub: snapshots, which huggingface_hub downloads, resumes and caches.

It compares sizes alone. So each file that arrives is checked against the hash by which the hub names it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str) -> bool:
    return HUB_ID.fullmatch(text) is not None and not text.lower().endswith(".gguf")


@cache  # a process sees one snapshot, whatever is pushed meanwhile
def fetch_snapshot(repository: str, revision: str | None, patterns: tuple[str, ...], option: str) -> Path:
    """Return the folder with those files of a repository that match a pattern, downloaded unless they are cached.

    Raises ValueError, for which `option` is named, if the hub is out of reach or a file arrives damaged.
    """
    from huggingface_hub import constants, snapshot_download

    cached = set((Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs").glob("*"))
    try:
        snapshot = Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # those of its HTTP library are of other types in each of its versions
        at = f" (revision {revision})" if revision else ""
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{option}{repository}{at}: neither a local folder nor reachable on the model hub ({type(error).__name__}: "
            f"{reason}). Check the spelling, the network and, for a gated model, `hf auth login`; after an "
            "interruption run it again, and whole files are not fetched again; or download it elsewhere and give the "
            f"folder: {option}/path/to/folder"
        ) from error
    damaged = [path for path in snapshot.rglob("*") if (blob := path.resolve()) not in cached and not is_whole(blob)]
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(sorted(path.relative_to(snapshot).as_posix() for path in damaged))
        raise ValueError(
            f"{option}{repository}: {names}: arrived damaged (not the bytes of its hash), and was removed again; "
            "run this once more to fetch it anew"
        )
    return snapshot


def cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a repository's files that were fetched before, None if its config.json was not."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def is_whole(blob: Path) -> bool:
    """Return whether a file of the cache holds the bytes that its name is the hash of; True if its name is none.

    Large files are named by their sha256, others by git's sha1, or by some mirrors with the content's.
    """
    if not blob.is_file() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return True
    if len(blob.name) == 64:
        return digest(blob, hashlib.sha256) == blob.name
    starts = (b"blob %d\0" % blob.stat().st_size, b"")
    return any(digest(blob, partial(hashlib.sha1, start, usedforsecurity=False)) == blob.name for start in starts)


def digest(file: Path, algorithm: Callable[[], Any]) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, algorithm).hexdigest()
