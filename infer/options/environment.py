"""Prepares a process. On import: sets environment variables that libraries read when imported; import this before them.
Keeps what the user set.
"""

import ctypes
import gc
import os
from pathlib import Path

from kernels import cache
from kernels.cpu import level

level.restrict_libraries(os.environ)
cache.redirect_libraries()
os.environ.setdefault("USE_HUB_KERNELS", "NO")
# How often a thread of GNU OpenMP polls for work before it yields its core: about 0.1 ms. By default it spins for
# milliseconds, and next to other busy processes a step with two threads then takes ten times as long; on an idle
# machine neither is faster. A chain of drafts loses a fifth with 0.01 ms.
SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def rest_collector() -> None:
    """Stop Python's garbage collector while a command starts: it took an eighth of that and found nothing, since
    modules and weights stay. Imports allocate most, so call this before them.
    """
    gc.disable()


def wake_collector() -> None:
    """Collect again, except what is there by now: looking through that would stop every stream for 0.1 s.

    What loading and profiling have freed goes back to the system; glibc alone would keep it, some 40 MB.
    """
    gc.freeze()
    gc.enable()
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def process_bytes(field: str) -> int:
    """Return a size of this process as Linux states it. Raises OSError elsewhere."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
