"""Where scripts/peers.sh puts the programs that are measured beside ours."""

from __future__ import annotations

from pathlib import Path

from infer.options.paths import resolve_path
from kernels.cpu.level import SWITCH, chosen_level


def built(peers: str | Path, peer: str, file: str) -> Path:
    """Return a file of a program that scripts/peers.sh built under `peers`. Raises ValueError if it is not there."""
    path = resolve_path(str(peers)) / peer / file
    if not path.is_file():
        level = f"{SWITCH}={chosen_level()} " if chosen_level() and peer == "llama.cpp" else ""
        raise ValueError(f"peers={peers}: {path} is not there; build it with {level}scripts/peers.sh {peer}")
    return path


def llama_cpp(peers: str | Path, program: str) -> Path:
    """Return a program or library of llama.cpp's build, of that for the level of HEADWAY_CPU_LEVEL if it is set.

    Raises ValueError if it is not there.
    """
    level = chosen_level()
    return built(peers, "llama.cpp", f"build{f'-{level}' if level else ''}/bin/{program}")
