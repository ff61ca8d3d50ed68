"""What exactness costs in the matrix products of a target on this CPU: our kernels beside the library's, in one run.

    python -m tests.exactness_price smollm2-135m      # or a folder, a .gguf file, a hub id
    HEADWAY_CPU_LEVEL=avx2 python -m tests.exactness_price smollm2-135m

A forward is the products of all linear layers one after another, each once, so that weights come from memory as in a
step; the LM head's are among them up to 64 rows. The library is oneDNN with weights packed in advance, and torch's own
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


def products(layer: Linear) -> tuple[int, dict[str, Product]]:
    """Return the inputs of a layer, and its product by system; the library rounds an LM head's logits to its dtype."""
    weight = layer.weight.detach()
    wide = weight.to(product_dtype(weight.dtype))
    packed = prepack(wide) if onednn_multiplies(wide.dtype) else None
    library: Product = lambda x: F.linear(x.to(wide.dtype), wide)  # noqa: E731
    ahead: Product = library if packed is None else lambda x: multiply(x.to(wide.dtype), packed, None)
    return weight.shape[1], {
        "ours": PackedLinear(weight, out_dtype=layer.out_dtype),
        SYSTEMS[1]: ahead,
        SYSTEMS[2]: library,
    }


def seconds(calls: Sequence[tuple[Product, Tensor]]) -> float:
    begin = time.perf_counter()
    for product, rows in calls:
        product(rows)
    return time.perf_counter() - begin


@torch.inference_mode()
def compare(layers: Sequence[tuple[int, dict[str, Product]]], count: int, rounds: int, dtype: torch.dtype) -> list[str]:
    """Return the cells of the table's row for `count` rows."""
    inputs = {size: torch.randn(count, size).to(dtype) for size, _ in layers}
    calls = {name: [(systems[name], inputs[size]) for size, systems in layers] for name in SYSTEMS}
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
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    model = compose("generate", GenerateConfig, [f"model={chosen.model}", "proposer=none", "prompt=x"]).model
    dtype = getattr(torch, chosen.dtype)
    target = load_target(str(model.path), dtype=dtype)
    linears = [module for module in target.modules() if isinstance(module, Linear)]
    layers = [products(linear) for linear in linears]
    wide = [linear.out_dtype is None or linear.out_features < 10_000 for linear in linears]
    print("| rows | ours, ms | oneDNN, packed, ms | F.linear, ms | ours, times oneDNN's speed | times F.linear's |")
    print("|---|---|---|---|---|---|")
    for count in chosen.rows:
        chosen_layers = [layer for layer, keep in zip(layers, wide, strict=True) if keep or count <= 64]
        print("|", " | ".join([str(count), *compare(chosen_layers, count, chosen.rounds, dtype)]), "|", flush=True)


if __name__ == "__main__":
    main()
