"""The other assemblers of a machine: the ptxas of installed CUDA toolkits.

One version of ptxas may make wrong code of a kernel for which another makes right code, so the checks of kernels run
under each that is found, besides the one that Triton calls (kernels/triton/assembler.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kernels.triton.assembler import version_in_use, version_of


def other_ptxas(capability: int) -> dict[str, str]:
    """Return the path of a ptxas for each version on this machine but that which Triton calls, by version."""
    in_use = version_in_use(capability)
    versions = ((version_of(path), path) for path in candidates())
    return dict(sorted((version, path) for version, path in versions if version and version != in_use))


def candidates() -> Iterable[str]:
    on_path = shutil.which("ptxas")
    folders = sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    return dict.fromkeys(str(Path(path).resolve()) for path in (*folders, on_path) if path)
