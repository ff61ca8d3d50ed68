"""Measures what ways of computing a target do to its distributions, on a text: perplexity, and KL from the first way.

    python scripts/perplexity.py smollm2-135m story.txt.xz
    python scripts/perplexity.py model.gguf story.txt --ways widened:same:float32,native,native:int8,llama.cpp
    python scripts/perplexity.py model.gguf code.txt --ways native,int4,int8:int8 --dtype bfloat16

A way is `weights[:activations[:dtype]]`, values of `engine.weights`, `engine.activations` and `model.dtype`, or
`llama.cpp`, which reads the same GGUF file. The reference is the first: `widened:same:float32` is what the file's
weights mean, computed without rounding. The text, plain or .xz, is cut into windows of `--window` tokens, of which
every token but the first is predicted from those before it. In float32 the weights of a GGUF file in their blocks
(`native`) and widened ones differ only in the order of sums. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infer.config import EngineConfig, ModelConfig
from infer.options.model_names import read_model
from infer.options.paths import resolve_path
from models.checkpoint import DTYPES
from models.gguf import is_gguf
from models.targets import resolve_checkpoint
from models.tokenizer import Tokenizer
from scripts.divergence import Scores, add_window
from scripts.document import describe_machine, markdown
from scripts.errors import reports_errors
from scripts.llama_logits import LlamaCpp

PAGE = 16  # positions of a KV page
Way = Callable[[Sequence[int]], Tensor]  # token ids of a window -> logits [T, V]


def read_text(file: Path) -> str:
    data = file.read_bytes()
    return (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")


def our_way(model: ModelConfig, engine: EngineConfig, window: int) -> Way:
    """Return a way that computes as the engine does. Raises ValueError for a configuration that it refuses."""
    from infer.config import ProposerConfig
    from infer.engine.loading import load_parts
    from infer.parallel.target_worker import Shard
    from kernels.rows import AttentionRows

    target = load_parts(model, None, ProposerConfig(name="none"), output_dir="outputs", engine=engine).target
    shard, pages = Shard(target, **engine.packing), -(-window // PAGE)
    shard.allocate(1 + pages, PAGE)
    table = 1 + torch.arange(pages)[None]

    def logits(ids: Sequence[int]) -> Tensor:
        rows = AttentionRows.blocks(table, [0], [len(ids)], page_size=PAGE)
        return shard.logits(shard.forward(torch.tensor(ids), rows.places, rows, []).hidden)

    return logits


def make_way(name: str, model: ModelConfig, args: argparse.Namespace) -> Way:
    """Return the way of that name. Raises ValueError for a name that is none, and for what the target cannot do."""
    weights, *words = name.split(":")
    if name == "llama.cpp":
        file = resolve_checkpoint(model.path_or_hub_id, model.revision)
        if not is_gguf(file):
            raise ValueError(f"--ways {name}: llama.cpp reads GGUF files only, and {file} is none")
        return LlamaCpp(resolve_path(args.peers), file, args.window, torch.get_num_threads())
    if len(words) > 2:
        raise ValueError(f"--ways {name}: must be weights[:activations[:dtype]] or llama.cpp")
    activations, dtype, *_ = *words, *("same", args.dtype)[len(words) :]
    if dtype not in DTYPES:
        raise ValueError(f"--ways {name}: dtype {dtype} must be one of {', '.join(DTYPES)}")
    return our_way(replace(model, dtype=dtype), EngineConfig(weights=weights, activations=activations), args.window)


def windows_of(file: Path, tokenizer: Tokenizer, tokens: int, window: int) -> list[list[int]]:
    """Return the text's first tokens in whole windows. Raises ValueError if the text is too short."""
    ids = tokenizer.encode(read_text(file))[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"{file}: holds {len(ids)} tokens; --tokens {tokens}")
    return [ids[start : start + window] for start in range(0, tokens - window + 1, window)]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python scripts/perplexity.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("model", help="a model as model= takes it")
    options.add_argument("text", type=Path, help="a file in UTF-8, maybe compressed (.xz)")
    options.add_argument("--ways", default="native,widened", help="see above, with commas between")
    options.add_argument("--dtype", default="float32", choices=DTYPES, help="of ways that name none")
    options.add_argument("--tokens", type=int, default=4096, help="of the text, from its beginning")
    options.add_argument("--window", type=int, default=512, help="tokens")
    options.add_argument("--peers", default=".peers", help="where scripts/peers.sh built llama.cpp")
    return options


@reports_errors
@torch.no_grad()
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.window < 2 or args.tokens < args.window:
        raise ValueError(f"--window {args.window}: must be 2 or more, and no more than --tokens {args.tokens}")
    model, names = read_model(args.model), args.ways.split(",")
    tokenizer = Tokenizer.load(resolve_checkpoint(model.path_or_hub_id, model.revision))
    windows = windows_of(args.text, tokenizer, args.tokens, args.window)
    ways = {name: make_way(name, model, args) for name in names}
    scores = {name: Scores() for name in ways}
    for ids in windows:
        reference = ways[names[0]](ids)
        for name, way in ways.items():
            add_window(scores[name], reference if name == names[0] else way(ids), reference, ids)
    results = {name: score.summary() for name, score in scores.items()}
    rows = [[name, *(f"{value:.5g}" for value in result.values())] for name, result in results.items()]
    header = ["way", "perplexity", "KL, mean", "±", "KL, 99 %", "largest", "same likeliest token"]
    print(markdown(header, rows, pad=True), end="")
    tokens = sum(len(ids) - 1 for ids in windows)
    print(json.dumps({"machine": describe_machine(), "tokens": tokens, "window": args.window, "ways": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
