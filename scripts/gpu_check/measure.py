"""Functions that make one line of the report: a comparison or a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 256 * 2**20  # more than any cache holds
TIMES = 15


def close(kernel: str, case: str, actual: Tensor, true: Tensor, bound: float) -> dict[str, Any]:
    """Return the largest error against a float64 reference, relative to the reference's largest value."""
    actual, true = actual.detach().double().cpu(), true.detach().double().cpu()
    differ = actual != true  # an expected infinity is no error, a NaN always is
    error = float((actual - true)[differ].abs().max() / true[true.isfinite()].abs().max()) if differ.any() else 0.0
    return {"kernel": kernel, "case": case, "error": error, "bound": bound, "ok": error <= bound}  # NaN is not


def same(kernel: str, case: str, actual: Tensor, expected: Tensor) -> dict[str, Any]:
    """Return the share of elements that differ; none may."""
    wrong = float((actual.detach().cpu() != expected.detach().cpu()).double().mean())
    return {"kernel": kernel, "case": case, "error": wrong, "bound": 0.0, "ok": wrong == 0}


def timed(
    kernel: str, case: str, device: torch.device, moved: int, call: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """Return the median time of `call(*args)` with cold caches; it must read and write at least `moved` bytes.

    On a CPU only one call is timed: the interpreter's time has no meaning, but the call must work.
    """
    entry = {"kernel": kernel, "case": case, "bytes": moved}
    call(*args)
    if device.type != "cuda":
        begin = time.perf_counter()
        call(*args)
        return entry | {"ms": 1000 * (time.perf_counter() - begin)}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMES)]
    for start, end in pairs:
        flush.zero_()  # the call is queued while this runs, so its time excludes the launch
        start.record()
        call(*args)
        end.record()
    torch.cuda.synchronize(device)
    return entry | {"ms": statistics.median(start.elapsed_time(end) for start, end in pairs)}


def copy_bandwidth(device: torch.device) -> float:
    """Return the GB/s of a plain copy, counting both bytes read and bytes written."""
    size = 2**30 if device.type == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.int8, device=device)
    into = torch.empty_like(source)
    entry = timed("copy", "", device, 2 * size, into.copy_, source)
    return entry["bytes"] / entry["ms"] / 1e6


def rated(entry: dict[str, Any], copy_gb_s: float) -> dict[str, Any]:
    """Return the entry with the bandwidth it reached and its share of a plain copy's bandwidth."""
    reached = entry["bytes"] / entry["ms"] / 1e6
    return entry | {"gb_s": round(reached, 2), "of_copy": round(reached / copy_gb_s, 4)}
