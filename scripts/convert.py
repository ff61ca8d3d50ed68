"""Converts a head's checkpoint from one format into another, and reports what each tensor became.

    python scripts/convert.py --from safeailab-eagle3 --to headway --verifier models/demo IN OUT
    python scripts/convert.py --from medusa --to vllm-medusa IN OUT
    python scripts/convert.py --from auto --to speculators --dry-run IN OUT
    python scripts/convert.py --from auto --to llama.cpp --dtype q8_0 --verifier TARGET.gguf IN OUT.gguf
    python scripts/convert.py --from auto --stitch --verifier TARGET IN OUT

With --stitch OUT is a copy of the target, whose own MTP modules are replaced by those of IN.
OUT must not exist yet and is written atomically, after the written files have been read back and compared.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.weights.ggml import GGML_FORMATS
from models.checkpoint import fingerprint
from models.config import read_config_json
from models.formats.conversion import (
    FORMATS,
    Checkpoint,
    ConversionOptions,
    RenderedCheckpoint,
    detect,
    read_checkpoint,
    render,
    save,
)
from models.formats.verifier import find_verifier, weights_of
from models.gguf import SUFFIX, is_gguf
from models.heads.files import fetch_head
from models.heads.mtp.formats import NATIVE, find_shipped, open_shipped, ships_modules
from models.hub import is_hub_id
from models.quantized.scheme import SECTION
from models.targets.writing import write_with
from scripts.errors import command_line, reports_errors
from train.storage import atomic
from train.storage.provenance import portable, provenance

DTYPES = ("f32", "bf16", "f16", *GGML_FORMATS)


def parser() -> argparse.ArgumentParser:
    heads = "\n".join(f"  {form.name:<18}{', '.join(form.heads)}" for form in FORMATS.values())
    options = command_line("convert.py", __doc__, f"formats and the heads that they hold:\n{heads}")
    options.add_argument("--from", dest="source", required=True, choices=["auto", *FORMATS], metavar="FORMAT")
    result = options.add_mutually_exclusive_group(required=True)
    result.add_argument("--to", dest="target", choices=list(FORMATS), metavar="FORMAT")
    result.add_argument("--stitch", action="store_true", help="write the head back into a copy of --verifier")
    options.add_argument(
        "folder", metavar="IN", type=Path, help="a folder with config.json and weights; a .gguf file; a hub id"
    )
    options.add_argument("out", metavar="OUT", type=Path, help="a folder, or .gguf file, that is not there yet")
    options.add_argument("--revision", metavar="REV", help="of IN on the hub: a branch, tag or commit")
    options.add_argument(
        "--verifier", metavar="PATH", help="the head's target: a folder, .gguf file or hub id; sizes are compared"
    )
    options.add_argument(
        "--dtype", choices=DTYPES, help="of the matrices of a GGUF file, instead of their own: 32 or 16 bits, or blocks"
    )
    options.add_argument(
        "--speculative-tokens", metavar="N", type=int, help="to draft per step, for formats that say so"
    )
    options.add_argument(
        "--layer-ids",
        choices=["hidden_states", "outputs"],
        help="what the source's auxiliary layer ids count: HF hidden_states, or 0-based layer outputs (one less)",
    )
    options.add_argument(
        "--norm-output",
        choices=["vllm", "specforge"],
        help="what norm_output means in the source: vLLM's, or SpecForge's before September 2026",
    )
    options.add_argument("--dry-run", action="store_true", help="do it all, and leave nothing behind")
    return options


def convert(args: argparse.Namespace) -> tuple[Checkpoint, RenderedCheckpoint]:
    """Convert IN and write it to OUT. Raises ValueError that names the problem and leaves no OUT behind."""
    if args.out.exists() or args.out.is_symlink():
        raise ValueError(f"{args.out}: is there already; remove it, or give another folder")
    if not args.dry_run:
        atomic.free_disk(args.out)  # refuses a place that cannot be written
    if args.stitch:
        args.target = NATIVE.name  # which refuses what has no place in a target
    target, tokens = FORMATS[args.target], args.speculative_tokens
    if tokens is not None and (tokens < 1 or not target.states_tokens):
        why = "must be at least 1" if tokens < 1 else f"{args.target} does not say how many"
        raise ValueError(f"--speculative-tokens {tokens}: {why}")
    if args.dtype is not None and not target.gguf:
        raise ValueError(f"--dtype {args.dtype}: {args.target} keeps the dtype of every tensor; only GGUF files differ")
    if is_gguf(args.out) != target.gguf:
        wanted = f"one file; end its name in {SUFFIX}" if target.gguf else "a folder; give it another name"
        raise ValueError(f"{args.out}: {args.target} is {wanted}")
    args.origin = args.folder.resolve().name
    if not args.folder.exists() and is_hub_id(str(args.folder)):
        args.origin = str(args.folder)
        args.folder = fetch_head(args.origin, args.revision, option="")
    source = detect(args.folder) if args.source == "auto" else FORMATS[args.source]
    args.source = source.name
    verifier, folder = find_verifier(args.verifier) if args.verifier else (None, None)
    provided = ConversionOptions(verifier, tokens, args.layer_ids, args.norm_output)
    checkpoint = read_checkpoint(source, args.folder, provided)
    trained_for = (checkpoint.provenance or {}).get("target_fingerprint")
    if folder and trained_for and trained_for != fingerprint(folder):
        raise ValueError(f"{args.folder}: this head was trained for another target than --verifier {args.verifier}")
    if args.stitch:
        return checkpoint, stitch(args, checkpoint, folder)
    if args.target == "headway" and checkpoint.provenance is None:
        checkpoint = replace(checkpoint, provenance=record(args, checkpoint, folder))
    of_target, tokenizer = weights_of(folder) if folder else None, None
    if target.gguf and folder and is_gguf(folder):
        from models.gguf.head import tokenizer_keys

        tokenizer = tokenizer_keys(folder)
    written = render(target, checkpoint, of_target=of_target, dtype=args.dtype, tokenizer=tokenizer)
    with destination(args.out, dry_run=args.dry_run) as staging:
        save(target, checkpoint, written, staging)
    return checkpoint, written


def stitch(args: argparse.Namespace, checkpoint: Checkpoint, target: Path | None) -> RenderedCheckpoint:
    """Write a copy of the target to OUT, with the tensors of `checkpoint` in place of its modules', in their dtype."""
    if target is None or is_gguf(target) or checkpoint.head not in NATIVE.heads:
        raise ValueError("--stitch: needs a head of MTP modules, and --verifier with the folder of their target")
    if not ships_modules(read_config_json(target / "config.json")):
        raise ValueError(f"--stitch: {target} ships no MTP modules; serve the head beside it, with head.path=")
    if SECTION in read_config_json(target / "config.json"):
        raise ValueError(f"--stitch: {target} is quantized, and its modules with it; stitch into one that is not")
    tensors, names = find_shipped(target)
    shapes = {name: list(tensors.shape(stored)) for name, stored in names.items()}
    other = [name for name, value in checkpoint.tensors.items() if shapes.get(name) != list(value.shape)]
    if other := [*other, *(names.keys() - checkpoint.tensors.keys())]:
        raise ValueError(
            f"--stitch: {target}: its modules and the head's differ in {min(other)}, of {len(other)} tensors"
        )
    values = {name: value.to(tensors[names[name]].dtype) for name, value in checkpoint.tensors.items()}
    with destination(args.out, dry_run=args.dry_run) as staging:
        write_with(target, staging, tensors.stored({names[name]: value for name, value in values.items()}))
        assert all(torch.equal(value, values[name]) for name, value in open_shipped(staging).items())
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in values.items()}
    return RenderedCheckpoint({}, values, names, dtypes, [])


@contextmanager
def destination(out: Path, *, dry_run: bool) -> Iterator[Path]:
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / out.name if is_gguf(out) else Path(folder)
    else:
        atomic.make_folder(out.parent)
        with atomic.replace_file(out) if is_gguf(out) else atomic.replace_folder(out) as staging:
            yield staging


def record(args: argparse.Namespace, checkpoint: Checkpoint, verifier: Path | None) -> dict[str, Any]:
    """Return the contents of provenance.json.

    The head is bound to the verifier by its fingerprint only if the verifier's weights are present.
    """
    facts: dict[str, Any] = {"converted_from": {"format": args.source, "folder": args.origin}}
    if checkpoint.verifier is not None:
        facts["target"] = checkpoint.verifier.name
    if verifier is not None and any(verifier.glob("*.safetensors")):
        facts["target_fingerprint"] = fingerprint(verifier)
    return portable(provenance({}, **facts))


def report(args: argparse.Namespace, checkpoint: Checkpoint, written: RenderedCheckpoint) -> str:
    rows = [("from", "to", "shape", "dtype", "note")]
    for key, name in sorted(written.names.items(), key=lambda item: item[1]):
        source, shape = checkpoint.sources.get(key, "the verifier's"), list(written.tensors[key].shape)
        rows.append((source, name, str(shape), written.dtypes[key], checkpoint.remarks.get(source, "")))
    left_out = {name: reason for name, reason in checkpoint.remarks.items() if name not in checkpoint.sources.values()}
    left_out |= {
        checkpoint.sources[key]: "follows from the others"
        for key in written.tensors
        if key not in written.names and key in checkpoint.sources
    }
    rows += [(name, "-", "", "", reason) for name, reason in left_out.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"note: {note}" for note in [*checkpoint.notes, *written.notes]]
    place = "nothing was kept (--dry-run)" if args.dry_run else f"in {args.out}"
    return "\n".join(
        [
            f"{checkpoint.head} head, {args.source} -> {args.target}",
            *lines,
            *notes,
            f"{len(written.names)} tensors, read back and equal; {place}",
        ]
    )


@reports_errors
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    print(report(args, *convert(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
