"""Measures this engine, the heads and other programs: python scripts/bench.py [SUBCOMMAND] [key=value ...]

    compare      the default: proposers, draft shapes, transformers and other programs, on the same prompts
    evaluate     an exported head by data set, temperature and draft shape
    train        speed and memory of training, beside the library speculators

`SUBCOMMAND --help` lists the keys; the docstring of scripts/benchmarks/SUBCOMMAND.py says what is done. The last line
of standard output is one JSON document. `save=NAME` keeps it in scripts/results/.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import importlib

SUBCOMMANDS = ("compare", "evaluate", "train")


def main() -> None:
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(__doc__)
    named = words and "=" not in words[0] and not words[0].startswith("-")
    subcommand = words[0] if named else "compare"
    if subcommand not in SUBCOMMANDS:
        print(f"error: {subcommand}: no such subcommand; there are {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = words[1:] if named else words
    importlib.import_module(f"scripts.benchmarks.{subcommand}").main()


if __name__ == "__main__":
    main()
