"""Levels of processors: which instructions the C kernels, torch and oneDNN may use.

HEADWAY_CPU_LEVEL lowers the machine's level, so that a kernel or a fallback of a lesser processor runs on a better one.
Imports nothing, because it must be applied before torch computes anything.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

SWITCH = "HEADWAY_CPU_LEVEL"
LEVELS = ("baseline", "avx2", "avx512", "amx")  # each contains those before it; other architectures are "baseline"
NEEDS = {  # flags of /proc/cpuinfo
    "avx2": {"avx2", "fma", "bmi2", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16"},
}
NATIVE = ("-march=native",)
COMPILED = {
    "baseline": ("-march=x86-64-v2",),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"),
    "amx": NATIVE,
}
LIBRARIES = {  # what restricts torch, oneDNN and MKL alike
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}


def processor_flags(cpuinfo: str) -> set[str]:
    """Return the features that the text of /proc/cpuinfo lists for its first processor."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def level_of(flags: set[str]) -> str:
    """Return the highest level of a processor with these flags."""
    reached = "baseline"
    for level in LEVELS[1:]:
        if not NEEDS[level] <= flags:
            break
        reached = level
    return reached


def machine_level() -> str:
    """Return the level of this machine, whatever the switch says."""
    try:
        return level_of(processor_flags(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return "baseline"


def chosen_level() -> str | None:
    """Return the level that HEADWAY_CPU_LEVEL asks for, None if it is not set. Raises ValueError if it is none."""
    wanted = os.environ.get(SWITCH) or None
    if wanted is not None and wanted not in LEVELS:
        raise ValueError(f"{SWITCH}={wanted}: no such level; there are {', '.join(LEVELS)}")
    return wanted


def level() -> str:
    """Return the level in use: the machine's, or the lower one of the switch.

    Raises ValueError if the switch asks for more than the machine has.
    """
    machine, wanted = machine_level(), chosen_level()
    if wanted is None:
        return machine
    if LEVELS.index(wanted) > LEVELS.index(machine):
        raise ValueError(f"{SWITCH}={wanted}: this processor has {machine}; leave {SWITCH} unset")
    return wanted


def compiler_flags() -> tuple[str, ...]:
    """Return the compiler's flags of the level in use; the switch means nothing on other architectures than x86."""
    wanted = chosen_level()
    return NATIVE if wanted is None or platform.machine() not in ("x86_64", "AMD64") else COMPILED[level()]


def restrict_libraries(environment: MutableMapping[str, str]) -> None:
    """Restrict torch, oneDNN and MKL to the switch's level, if it is set. Only before torch computes anything."""
    if chosen_level() is not None:
        environment.update(LIBRARIES[level()])
