"""python -m tests.gpu_check: see gpu_check.sh."""

import sys

from tests.gpu_check.command import main

sys.exit(main(sys.argv[1:]))
