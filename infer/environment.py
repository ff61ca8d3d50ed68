"""What libraries read from the environment as they are loaded: imported before any of them. What is set stays."""

import os

os.environ.setdefault("USE_HUB_KERNELS", "NO")
# How often a thread of GNU OpenMP looks for work before it gives its core away: some 0.1 ms. By default it spins for
# milliseconds, and beside other busy processes a step of two threads takes ten times as long; on an idle machine
# neither is faster.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
