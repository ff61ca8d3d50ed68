"""What exactness costs in the matrix products of a target on this CPU: our kernels beside the library's, in one run.

    python -m tests.exactness_price smollm2-135m      # or a folder, a .gguf file, a hub id
    HEADWAY_CPU_LEVEL=avx2 python -m tests.exactness_price smollm2-135m

A forward is the products of all linear layers one after another, each once, so that weights come from memory as in a
step; the LM head's is among them up to 64 rows. The library is oneDNN with weights packed in advance, and torch's own
call (`F.linear`), in bf16, or in fp32 where oneDNN has no products of 16 bits on this processor; neither promises a row
the same bits in every batch. Prints medians and the quartiles of our speed relative to each, by number of rows.
"""

from __future__ import annotations

import infer.options.environment  # noqa: F401

# isort: split

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import GenerateConfig
from infer.options.cli import compose
from kernels.capabilities import multiply, onednn_multiplies, prepack, product_dtype
from kernels.linear import PackedLinear
from models.layers import Linear
from models.targets import load_target

Product = Callable[[Tensor], Tensor]
SYSTEMS = ("ours", "oneDNN, packed", "F.linear")
MOST_CHOSEN = 64  # rows whose next tokens are chosen; of more, a prompt, the LM head runs on few


def products(layer: Linear) -> dict[str, Product]:
    """Return a layer's product by system. The library rounds an LM head's logits to its dtype."""
    weight = layer.weight.detach()
    wide = weight.to(product_dtype(weight.dtype))
    packed = prepack(wide) if onednn_multiplies(wide.dtype) else None

    def by_torch(x: Tensor) -> Tensor:
        return F.linear(x.to(wide.dtype), wide)

    def by_onednn(x: Tensor) -> Tensor:
        return by_torch(x) if packed is None else multiply(x.to(wide.dtype), packed, None)

    ours = PackedLinear(weight, out_dtype=layer.out_dtype)
    return dict(zip(SYSTEMS, (ours, by_onednn, by_torch), strict=True))


def seconds(calls: Sequence[tuple[Product, Tensor]]) -> float:
    begin = time.perf_counter()
    for product, rows in calls:
        product(rows)
    return time.perf_counter() - begin


@torch.inference_mode()
def compare(layers: Sequence[Linear], made: Sequence[dict[str, Product]], count: int, rounds: int) -> list[str]:
    """Return the cells of the table's row for `count` rows through `layers`, whose products were `made`."""
    inputs = {size: torch.randn(count, size) for size in {layer.in_features for layer in layers}}
    rows = [inputs[layer.in_features].to(layer.weight.dtype) for layer in layers]
    calls = {name: [(each[name], x) for each, x in zip(made, rows, strict=True)] for name in SYSTEMS}
    times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for turn in range(rounds + 1):
        for name in (*SYSTEMS[turn % 3 :], *SYSTEMS[: turn % 3]):
            times[name] += [seconds(calls[name])] * (turn > 0)  # the first round warms up
    cells = [f"{1e3 * statistics.median(times[name]):.2f}" for name in SYSTEMS]
    for name in SYSTEMS[1:]:
        ratios = [other / own for other, own in zip(times[name], times["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness_price", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error(f"--rounds {chosen.rounds}: a spread needs at least 2")
    model = compose("generate", GenerateConfig, [f"model={chosen.model}", "proposer=none", "prompt=x"]).model
    target = load_target(str(model.path), dtype=getattr(torch, chosen.dtype))
    layers = [module for module in target.modules() if isinstance(module, Linear)]
    layers.sort(key=lambda layer: layer is target.lm_head)  # last, where a prompt does without
    made = [products(layer) for layer in layers]
    print("| rows | ours, ms | oneDNN, packed, ms | F.linear, ms | ours, times oneDNN's speed | times F.linear's |")
    print("|---|---|---|---|---|---|")
    for count in chosen.rows:
        used = len(layers) - (count > MOST_CHOSEN)
        cells = compare(layers[:used], made[:used], count, chosen.rounds)
        print("|", " | ".join([str(count), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
