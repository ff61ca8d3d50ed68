"""The command line of gpu_check. Imports no torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from scripts.gpu_check import PARTS

OUT = os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results"
LIMIT = 480  # seconds of a part on a GPU: nine minutes, less one to start and to end


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu_check.sh",
        description="Checks and times this machine's GPU: kernels, the engine's exactness, speculation end to end.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "call", nargs="?", type=int, choices=(1, 2, 3), help="one part in nine minutes: 1 kernels, 2 exact, 3 bench"
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given more than once")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="where the JSON report grows; default: $OUT if set"
    )
    parser.add_argument("--seconds", type=float, default=LIMIT, help=f"of each part; default: {LIMIT}")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and how long it takes at most")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, with tiny shapes")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the demo target, for bench")
    parser.add_argument("--minutes", type=float, default=1.0, help="to train such a head, where none is given")
    parser.add_argument("--commit", help="what is checked, for the report of a machine without a git checkout")
    # What the command starts itself with: a share of the kernels to compile, or a part to add to a report.
    for option, kind in (("--share", str), ("--part", str), ("--report", Path), ("--until", float)):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.call is not None and args.only:
        parser.error("give a call or --only, not both")
    args.only = args.only or (list(PARTS) if args.call is None else [PARTS[args.call - 1]])
    return args
