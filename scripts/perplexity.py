"""Measures the perplexity of a target on a text, once for each way of holding its weights: whether they are the same.

    python scripts/perplexity.py smollm2-135m story.txt.xz
    python scripts/perplexity.py model.gguf story.txt --weights native,widened,int4 --dtype bfloat16

The text, plain or .xz, is cut into windows of `--window` tokens, of which every token but the first is predicted from
those before it. In float32 the weights of a GGUF file in their blocks (`native`) and widened ones differ only in the
order of sums. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: F401

# isort: split

import argparse
import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infer.config import EngineConfig
from models.checkpoint import DTYPES
from scripts.errors import reports_errors


def read_text(file: Path) -> str:
    data = file.read_bytes()
    return (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")


def perplexity(engine, windows: Sequence[Sequence[int]]) -> float:
    """Return exp of the mean negative log-likelihood, in nats, of every token but the first of each window."""
    from infer.request import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    completions = engine.generate([list(window) for window in windows], params)
    scored = [item.logprob for completion in completions for item in completion.prompt_logprobs]
    return math.exp(-math.fsum(scored) / len(scored))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python scripts/perplexity.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("model", help="a model as model= takes it")
    options.add_argument("text", type=Path, help="a file in UTF-8, maybe compressed (.xz)")
    options.add_argument("--weights", default="native,widened", help="values of engine.weights, with commas between")
    options.add_argument("--dtype", default="float32", choices=DTYPES)
    options.add_argument("--tokens", type=int, default=4096, help="of the text, from its beginning")
    options.add_argument("--window", type=int, default=512, help="tokens")
    return options


@reports_errors
def main(argv: list[str]) -> int:
    from infer.engine import Engine
    from infer.options.model_names import read_model

    args = parser().parse_args(argv)
    if args.window < 2 or args.tokens < args.window:
        raise ValueError(f"--window {args.window}: must be 2 or more, and no more than --tokens {args.tokens}")
    model, text, results = read_model(args.model), read_text(args.text), dict[str, float]()
    for weights in args.weights.split(","):
        config = EngineConfig(weights=weights, max_batch=4)
        engine = Engine.load(replace(model, dtype=args.dtype), "none", config, "none", profile=False)
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text)[: args.tokens]
        if len(ids) < args.tokens:
            raise ValueError(f"{args.text}: holds {len(ids)} tokens; --tokens {args.tokens}")
        windows = [ids[start : start + args.window] for start in range(0, len(ids) - args.window + 1, args.window)]
        results[weights] = perplexity(engine, windows)
        print(f"{weights:<8} {results[weights]:.8g}", flush=True)
    first = next(iter(results.values()))
    difference = max(abs(value / first - 1) for value in results.values())
    print(f"largest relative difference from the first: {difference:.1e}")
    print(json.dumps({"tokens": args.tokens, "dtype": args.dtype, "perplexity": results, "difference": difference}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
