"""python -m scripts.gpu_check: see gpu_check.sh."""

import sys

from scripts.gpu_check.command import main

sys.exit(main(sys.argv[1:]))
