"""The command line of gpu_check. Imports torch and what it runs only when all that this needs is there."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import infer.options.environment  # noqa: F401

# isort: split

from scripts.errors import reports_errors

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HEADWAY_COMPILE_ALL"] = "1"  # what passed before, on this machine or another, is checked anew
OUT = os.environ.get("OUT") or Path(__file__).resolve().parents[2] / "scripts" / "results"
SECONDS = 540.0  # of all parts together: a call of ten minutes, less one to start and to end
PARTS = ("kernels", "exact", "train", "bench", "timings")
EXTRA = ("tiles",)  # parts that run only where they are named
NEEDED = ("torch", "triton", "transformers", "pytest", "hypothesis")  # to run anything


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu_check.sh",
        description="Checks and times this machine's GPU: kernels, the engine's exactness, training, speculation.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, *EXTRA), help="one part; may be given more than once"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="where the JSON report grows; default: $OUT if set"
    )
    parser.add_argument("--seconds", type=float, help=f"of all parts together; default: {SECONDS:.0f} on a GPU")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and how long it takes at most")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, with tiny shapes")
    parser.add_argument(
        "--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the demo target; else one is trained"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="of training, where no head is given; default: 0.5")
    parser.add_argument(
        "--bundled-ptxas", action="store_true", help="check kernels as Triton's own ptxas makes them, and by no other"
    )
    parser.add_argument("--commit", help="what is checked, where the tree is a copy without its history")
    args = parser.parse_args(argv)
    args.only = [part for part in (*PARTS, *EXTRA) if part in (args.only or PARTS)]
    if args.seconds is None and not args.interpret:
        args.seconds = SECONDS
    if args.head is not None:
        args.head = args.head.resolve()
        if not (args.head / "config.json").is_file():
            raise ValueError(f"--head {args.head}: no head lies there; give the folder with its config.json")
    return args


@reports_errors
def main(argv: list[str]) -> int:
    args = parse(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)}; scripts/README.md says which wheels to bring along")
    if args.interpret:  # read when triton is imported
        os.environ.update(TRITON_INTERPRET="1", HEADWAY_KERNELS="triton")
    from tests.gpu_check import runner

    return runner.dry_run(args) if args.dry_run else runner.run(args)
