"""Resolves precision=auto: the dtype of a run's matrix products; parameters are in fp32 either way.

A processor without bf16 instructions multiplies in bf16 too, several times slower than in fp32. So on a CPU both are
timed. A run keeps the dtype with which it was begun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from infer.devices import resolve_device
from train.config import TrainConfig
from train.storage.run_folder import stored_config

ROWS, INPUTS, OUTPUTS = 512, 512, 512  # of a head of the demo's size; larger products differ by more
REPEATS = 3  # of each timing, alternating; the shortest counts
GAIN = 1.25  # a bf16 product must be so many times as fast: casts between products take what smaller gains bring

Timing = Callable[[torch.dtype], float]  # seconds of a product, forward and backward


class Precision(NamedTuple):
    name: str  # "fp32" or "bf16"
    reason: str = ""  # empty if the configuration names it


def compare_products(seconds: Timing) -> Precision:
    """Return the faster dtype by timing products in both."""
    times = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(REPEATS):
        for dtype in times:
            times[dtype] = min(times[dtype], seconds(dtype))
    ratio = times[torch.float32] / times[torch.bfloat16]
    if ratio >= GAIN:
        return Precision("bf16", f"a product in bf16 is {ratio:.1f} times as fast as in fp32 here")
    return Precision("fp32", f"a product in bf16 takes {1 / ratio:.1f} times as long as in fp32 here")


def time_product(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a linear layer's three products: of the forward, and of both gradients."""
    x, weight = torch.ones(ROWS, INPUTS, dtype=dtype), torch.ones(OUTPUTS, INPUTS, dtype=dtype)
    begin = clock()
    y = x @ weight.t()
    _ = y @ weight, y.t() @ x
    return clock() - begin


@cache
def faster_on_cpu() -> Precision:
    """Return the faster dtype on this machine, measured once per process."""
    return compare_products(time_product)


def choose_precision(config: TrainConfig) -> Precision:
    """Return the precision of a run: configured, or that with which the run was begun, or the faster one.

    Several processes must agree without having measured the same: on CPUs they compute in fp32.
    """
    if config.precision != "auto":
        return Precision(config.precision)
    if resolve_device(config.model.device).type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "this GPU has it")
        return Precision("fp32", "this GPU has no bf16")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Precision("fp32", "several processes on CPUs do not measure what is faster; precision=bf16 is the other")
    stored = stored_config(config)
    if stored is not None and stored.precision != "auto":
        return Precision(stored.precision, "the run was begun with it")
    return faster_on_cpu()


def compute_dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if choose_precision(config).name == "bf16" else torch.float32
