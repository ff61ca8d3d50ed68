"""The assemblers of a machine: the ptxas that Triton brings along, and those of installed CUDA toolkits.

One version of ptxas may make wrong code of a kernel for which another makes right code, so the checks of kernels run
under each that is found. Triton takes the one that TRITON_PTXAS_PATH names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import triton


def bundled_ptxas() -> str:
    """Return the path of the one in Triton's package, which it uses unless told otherwise."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")


def version_in_use() -> str | None:
    """Return the version of the ptxas that Triton calls, or None if it has none that runs."""
    return version_of(os.environ.get("TRITON_PTXAS_PATH") or bundled_ptxas())


def other_ptxas() -> dict[str, str]:
    """Return the path of a ptxas for each version on this machine but that of Triton's own, by version."""
    bundled = version_of(bundled_ptxas())
    versions = ((version_of(path), path) for path in candidates())
    return dict(sorted((version, path) for version, path in versions if version and version != bundled))


def candidates() -> Iterable[str]:
    on_path = shutil.which("ptxas")
    folders = sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    return dict.fromkeys(str(Path(path).resolve()) for path in (*folders, on_path) if path)


def version_of(path: str) -> str | None:
    """Return the version that the program states, as in 12.8.93; None if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match and match[1]
