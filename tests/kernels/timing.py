"""Times of launches, each of which becomes one line of the report of tests/gpu_check."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

FLUSH_BYTES = 256 * 2**20  # more than any cache holds
TIMES = 15
T = TypeVar("T")


def timing(
    kernel: str, case: str, device: torch.device, moved: int, launch: Callable[[], object], *, capture: bool = True
) -> dict[str, Any]:
    """Return the median time of a launch with cold caches; it must read and write at least `moved` bytes.

    `ms` is that of a replayed CUDA graph, which leaves out the host, and `launched_ms` that of the same call launched
    one kernel after another, with the gaps that this leaves. What is not to be captured, because the host reads what
    it computes or it runs a backward pass, has only the latter, as both. On a CPU only one call is timed: the
    interpreter's time has no meaning, but the call must work.
    """
    line: dict[str, Any] = {"kernel": kernel, "case": case, "bytes": moved}
    begin = time.perf_counter()
    launch()
    if device.type != "cuda":
        return line | {"ms": 1000 * (time.perf_counter() - begin)}
    launched = median_ms(launch, device)
    line |= {"ms": launched, "launched_ms": launched, "graph": capture}
    if capture:
        try:
            line["ms"] = median_ms(captured(launch, device)[0].replay, device)
        except RuntimeError as error:  # a time with the host's gaps is better than none
            line["graph"] = str(error)[:200]
    return line


def captured(launch: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a CUDA graph of the launch, which has been made once before, and what it writes to."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()  # for what is allocated or chosen on a stream's first use
        # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, for each of hundreds of captures.
        graph.capture_begin()
        try:
            out = launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, out


def median_ms(launch: Callable[[], object], device: torch.device) -> float:
    """Return the median time between events around the launch, after a read of more bytes than a cache holds.

    A write would leave dirty lines, which the launch would have to write back.
    """
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    sums = torch.empty((), device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMES)]
    launch()
    for start, end in pairs:
        torch.sum(flush, dim=0, out=sums)  # the launch is queued while this runs, so the time excludes its beginning
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def copy_bandwidth(device: torch.device) -> float:
    """Return the GB/s of a plain copy, counting both bytes read and bytes written."""
    size = 2**30 if device.type == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.int8, device=device)
    destination = torch.empty_like(source)
    line = timing("copy", "", device, 2 * size, lambda: destination.copy_(source))
    return line["bytes"] / line["ms"] / 1e6


def shortest_ms(device: torch.device) -> float:
    """Return the time of a call that does next to nothing: what a short kernel's time contains beside the kernel's."""
    one = torch.zeros(1, device=device)
    return timing("", "", device, 0, lambda: one.add_(1))["ms"]


def rated(line: dict[str, Any], copy_gb_s: float) -> dict[str, Any]:
    """Return the line with the bandwidth it reached and its share of a plain copy's bandwidth."""
    reached = line["bytes"] / line["ms"] / 1e6
    return line | {"gb_s": round(reached, 2), "of_copy": round(reached / copy_gb_s, 4)}
