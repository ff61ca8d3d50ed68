"""Sets environment variables that libraries read when imported; import this before them. Keeps what the user set."""

import os

os.environ.setdefault("USE_HUB_KERNELS", "NO")
# How often a thread of GNU OpenMP polls for work before it yields its core: about 0.1 ms. By default it spins for
# milliseconds, and next to other busy processes a step with two threads then takes ten times as long; on an idle
# machine neither is faster.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
