"""Enlarges the demo target, and a head trained for it, to the sizes of a large model without changing its output.

    python scripts/inflate_demo.py --shape llama3.1-8b OUT
    python scripts/inflate_demo.py --shape intermediate_size=1792 --dtype float32 OUT
    python scripts/inflate_demo.py --shape 0.4b --head outputs/heads/demo/eagle3 OUT
    python scripts/inflate_demo.py --shape 0.4b --new-ids zero OUT
    python infer/generate.py model=demo model.path=OUT head=eagle3 head.path=OUT/eagle3 compare=true

The enlarged target has the small model's logits, and so its text and acceptance length, at the large model's cost: for
measuring speed where no real weights are available. OUT is written atomically. Results measured on it state that.
With `--new-ids zero` it can be quantised to blocks (scripts/quantise_gguf.py), and only greedy text stays.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
from pathlib import Path
from typing import Any

import torch

from infer.options.paths import REPO_ROOT
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head, save_head
from models.heads.measured_tree import RANK_ACCURACY, rank_accuracy
from models.targets import load_target
from models.weights import fingerprint
from scripts.errors import reports_errors
from scripts.inflation import SHAPES, inflate_head, shape_of, write_target
from train.publishing.provenance import provenance
from train.storage import atomic

DRAFT_TOKENS = 5  # speculative tokens per step, for the exported config
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python scripts/inflate_demo.py",
        description=(__doc__ or "").partition("\n\n")[0],
        allow_abbrev=False,
    )
    options.add_argument("out", metavar="OUT", type=Path, help="a folder that is not there yet")
    sizes = f"{', '.join(SHAPES)}, or sizes to change: hidden_size=512,num_layers=24"
    options.add_argument("--shape", required=True, metavar="SHAPE", help=sizes)
    options.add_argument("--model", default=str(REPO_ROOT / "models/demo"), metavar="FOLDER", help="what to enlarge")
    options.add_argument("--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of it, enlarged into OUT/eagle3")
    options.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    options.add_argument("--seed", type=int, default=0, help="of the new weights")
    low = "logits of token ids that the small model lacks: -10^6, or 0, which weights in 4- to 8-bit blocks can hold"
    options.add_argument("--new-ids", default="low", choices=("low", "zero"), help=low)
    return options


def inflate(args: argparse.Namespace) -> None:
    """Write the enlarged target and head to OUT. Raises ValueError that names the problem and leaves no OUT behind."""
    if args.out.exists() or args.out.is_symlink():
        raise ValueError(f"{args.out}: is there already; remove it, or give another folder")
    dtype, marked = DTYPES[args.dtype], args.new_ids == "low"
    small = load_target(args.model)
    shape = shape_of(args.shape, small.config)
    head = load_head(args.head, target=small) if args.head else None
    if head is not None and not isinstance(head, Eagle3Head):
        raise ValueError(f"--head {args.head}: a head of kind {head.config.name}; only EAGLE-3 heads are enlarged")
    with atomic.replace_folder(args.out) as staging:
        write_target(args.model, shape, staging, dtype=dtype, seed=args.seed, marked=marked)
        if head is not None:
            folder = staging / "eagle3"
            folder.mkdir()
            options = {"target_layers": small.config.num_layers, "seed": args.seed, "marked": marked}
            wide = inflate_head(head, shape, dtype=dtype, device="cpu", **options)
            facts: dict[str, Any] = {"inflated_from": str(args.head), "target": str(args.model), "shape": args.shape}
            facts |= {"target_fingerprint": fingerprint(staging)}
            if accuracy := rank_accuracy(args.head):  # which stays as it is, as the logits do
                facts[RANK_ACCURACY] = accuracy
            save_head(
                wide,
                folder,
                verifier=str(args.out),
                verifier_architecture=small.config.architecture,
                speculative_tokens=DRAFT_TOKENS,
                provenance=provenance({}, **facts),
            )


@reports_errors
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    inflate(args)
    size = sum(file.stat().st_size for file in args.out.rglob("*.safetensors")) / 2**30
    print(f"{args.model} at the sizes of {args.shape} ({args.dtype}, {size:.1f} GiB) in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
