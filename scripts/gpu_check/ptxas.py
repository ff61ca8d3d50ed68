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
from typing import NamedTuple

import triton


class Ptxas(NamedTuple):
    path: str
    version: str  # as in 12.8.93

    @property
    def name(self) -> str:
        return f"ptxas {self.version}"


def bundled_ptxas() -> Ptxas | None:
    """Return the one that lies in Triton's package, which it uses unless told otherwise; None if there is none."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    version = version_of(str(path))
    return None if version is None else Ptxas(str(path), version)


def version_in_use() -> str | None:
    """Return the version of the ptxas that Triton calls, or None if it has none that runs."""
    named = os.environ.get("TRITON_PTXAS_PATH")
    if named:
        return version_of(named)
    bundled = bundled_ptxas()
    return None if bundled is None else bundled.version


def other_ptxas() -> list[Ptxas]:
    """Return those of this machine whose version is not that of Triton's own, each version once."""
    bundled, others = bundled_ptxas(), dict[str, Ptxas]()
    for path in candidates():
        version = version_of(path)
        if version is not None and (bundled is None or version != bundled.version):
            others.setdefault(version, Ptxas(str(path), version))
    return [others[version] for version in sorted(others)]


def candidates() -> Iterable[str]:
    on_path = shutil.which("ptxas")
    folders = sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    return dict.fromkeys(str(Path(path).resolve()) for path in (on_path, *folders) if path)


def version_of(path: str) -> str | None:
    """Return the version that the program states, or None if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match[1] if match else None
