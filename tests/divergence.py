"""KL divergence from fp32 of a target in 16 bits, both as an engine computes them, on texts of this repository.

python -m tests.divergence smollm2-135m      # or a folder, a .gguf file, a hub id
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infer.config import EngineConfig, GenerateConfig, ModelConfig, ProposerConfig
from infer.engine.loading import load_parts
from infer.options.cli import compose
from infer.processes.target_worker import Shard
from kernels.rows import AttentionRows
from models.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("CONTRIBUTING.md", "infer/request.py", "docs/architecture.md", "kernels/cpu/decoder.c")
WINDOW, PAGE = 320, 16  # tokens that are computed at once, and of a page


def shard_of(model: ModelConfig, dtype: str, weights: str) -> tuple[Shard, Tokenizer | None]:
    engine = EngineConfig(weights=weights)
    parts = load_parts(
        replace(model, dtype=dtype), None, ProposerConfig(name="none"), output_dir="outputs", engine=engine
    )
    shard = Shard(parts.target, **engine.packing)
    shard.allocate(1 + WINDOW // PAGE, PAGE)
    return shard, parts.tokenizer


@torch.inference_mode()
def log_probs(shard: Shard, ids: list[int]) -> Tensor:
    """Return the log-probabilities `[T, V]` after each of the ids."""
    table = 1 + torch.arange(WINDOW // PAGE)[None]
    rows = AttentionRows.blocks(table, [0], [len(ids)], page_size=PAGE)
    hidden = shard.forward(torch.tensor(ids), rows.places, rows, []).hidden
    return shard.target.logits(hidden).float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.divergence", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--windows", type=int, default=1, help=f"of {WINDOW} tokens, from the beginning of each text")
    chosen = parser.parse_args()
    model = compose("generate", GenerateConfig, [f"model={chosen.model}", "proposer=none", "prompt=x"]).model
    (exact, tokenizer), (rounded, _) = shard_of(model, "float32", "widened"), shard_of(model, chosen.dtype, "same")
    assert tokenizer is not None
    divergences, same = list[Tensor](), list[Tensor]()
    for text in TEXTS:
        ids = tokenizer.encode((ROOT / text).read_text(encoding="utf-8"))
        for window in range(chosen.windows):
            if len(piece := ids[window * WINDOW : (window + 1) * WINDOW]) < WINDOW:
                break
            before, after = log_probs(exact, piece), log_probs(rounded, piece)
            divergences.append((before.exp() * (before - after)).double().sum(-1))
            same.append(before.argmax(-1) == after.argmax(-1))
    nats, equal = torch.cat(divergences), torch.cat(same).double()
    error = 1e3 * nats.std() / len(nats) ** 0.5
    print(
        f"{len(nats)} tokens, 10^-3 nats: {1e3 * nats.mean():.3f} ± {error:.3f}, 99th percentile "
        f"{1e3 * nats.quantile(0.99):.2f}; likeliest token the same {equal.mean():.1%}"
    )


if __name__ == "__main__":
    main()
