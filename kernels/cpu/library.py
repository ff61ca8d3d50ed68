"""Builds the C kernels once per machine and loads them.

The C compiler is the machine's (`CC`, cc, gcc or clang). The library is kept in the user's cache folder under a name
that hashes sources, flags, compiler and processor, so nothing stale is ever loaded, and ends with a hash of its own
content, so nothing cut is: to load less than what the loader maps would end the process. Without a compiler, or with
HEADWAY_CPU_KERNELS=torch, callers fall back to torch; scripts/doctor.py says which is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from kernels.cache import cache_file, placed
from kernels.cpu.declarations import SOURCES, functions
from kernels.cpu.level import compiler_flags

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
SWITCH = "HEADWAY_CPU_KERNELS"
HASH = hashlib.sha256().digest_size
BUILD_TIMEOUT_S = 600  # some ten seconds on an idle machine

log = logging.getLogger(__name__)


def compiler() -> str | None:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def flags() -> tuple[str, ...]:
    """Return the compiler's flags, the level's processor (level.py) before the others."""
    return (*compiler_flags(), *FLAGS)


def processor() -> str:
    """Return a description of the processor that covers what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features", "CPU part")))


def library_file(cc: str) -> Path:
    version = subprocess.run([cc, "--version"], capture_output=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
    digest = hashlib.sha256(repr((flags(), version, processor(), platform.machine())).encode())
    for file in SOURCES:
        digest.update(file.read_bytes())
    return cache_file(f"kernels-{digest.hexdigest()[:24]}.so", is_whole)


def is_whole(file: Path) -> bool:
    """Return whether the file is there and ends with the hash of all before, which the loader ignores."""
    if not file.is_file():
        return False
    content = file.read_bytes()
    return content[-HASH:] == hashlib.sha256(content[:-HASH]).digest()


def build(cc: str, file: Path) -> None:
    """Compile the library to `file`, atomically, so that processes may build it concurrently.

    Raises CalledProcessError or OSError.
    """
    with placed(file) as part:
        sources = [str(file) for file in SOURCES if file.suffix == ".c"]
        command = [cc, *flags(), *sources, "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        with part.open("ab") as library:
            library.write(hashlib.sha256(part.read_bytes()).digest())


@cache
def library() -> ctypes.CDLL | None:
    """Return the C kernels, or None if they are unavailable; the reason is logged once."""
    if os.environ.get(SWITCH) == "torch":
        return None
    cc = compiler()
    if cc is None:
        log.warning("no C compiler (tried $CC, cc, gcc, clang): CPU kernels fall back to torch, several times slower")
        return None
    try:
        file = library_file(cc)
        if not is_whole(file):
            log.info("building the CPU kernels with %s, once for this machine", cc)
            build(cc, file)
        lib = ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        log.warning("%s could not build the CPU kernels, which fall back to torch: %s %s", cc, error, detail.decode())
        return None
    for name, (result, arguments) in functions().items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.linear_tiles(1)
    return lib
