"""python -m scripts.gpu_check [--only PART] [--seconds N] [--out FOLDER] [--interpret]: see gpu_check.sh."""

from __future__ import annotations

import os
import sys

import infer.options.environment  # noqa: F401

# isort: split

from scripts.errors import reports_errors
from scripts.gpu_check.arguments import parse

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@reports_errors
def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.interpret:  # read when triton is imported
        os.environ.update(TRITON_INTERPRET="1", HEADWAY_KERNELS="triton")
    try:
        from scripts.gpu_check import compiling, runner
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed, and the check needs it") from error
    if args.dry_run:
        return runner.dry_run(args)
    if args.share is not None:
        compiling.compile_share(args.share, runner.device_of(args.interpret), args)
        return 0
    return runner.work(args) if args.group is not None else runner.run(args, argv)


sys.exit(main(sys.argv[1:]))
