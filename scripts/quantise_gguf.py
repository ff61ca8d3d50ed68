"""Writes a target's folder as GGUF files in blocks of 4 to 8 bits, to measure formats beside llama.cpp.

    python scripts/inflate_demo.py --shape 0.4b --new-ids zero /tmp/0.4b
    python scripts/quantise_gguf.py /tmp/0.4b OUT --formats Q4_0,Q8_0,Q4_K,Q6_K

writes OUT/0.4b-Q4_0.gguf and so on, each with all matrices in one format. llama.cpp's own converter and quantiser do
it (scripts/peers.sh llama.cpp); the 16-bit file in between, as large as the folder, is deleted.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
from pathlib import Path

from infer.options.paths import resolve_path
from models.targets import resolve_checkpoint
from scripts.errors import reports_errors
from scripts.gguf_files import write_quantised


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python scripts/quantise_gguf.py", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    options.add_argument("target", metavar="FOLDER", help="a checkpoint in 16 or 32 bits")
    options.add_argument("out", metavar="OUT", type=Path, help="the folder for the files")
    options.add_argument("--formats", required=True, metavar="NAMES", help="ggml's, with commas between: Q4_0,Q4_K")
    options.add_argument("--peers", default=".peers", metavar="FOLDER", help="where scripts/peers.sh built llama.cpp")
    return options


@reports_errors
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    target = resolve_checkpoint(args.target, option="")
    for file in write_quantised(resolve_path(args.peers), target, args.formats.split(","), args.out):
        print(f"{file.stat().st_size / 1e6:,.0f} MB in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
