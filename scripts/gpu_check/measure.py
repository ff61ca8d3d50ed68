"""What checks of kernels are made of: comparisons and timings, each of which becomes one line of the report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

FLUSH_BYTES = 256 * 2**20  # more than any cache holds
TIMES = 15
T = TypeVar("T")


class Item(Protocol):
    def launch(self) -> object:
        """Launch the kernel if it has not been launched yet, so that it is compiled."""

    def line(self) -> dict[str, Any]:
        """Return the line of the report."""
        ...


@dataclass(frozen=True)
class Comparison:
    """A kernel's result beside the expected one, which is computed when the line is."""

    kernel: str
    case: str
    actual: Tensor
    expected: Tensor | Callable[[], Tensor]
    bound: float | None  # of the error; None: no element may differ

    def launch(self) -> None:
        pass  # the kernel has been

    def line(self) -> dict[str, Any]:
        expected = self.expected if isinstance(self.expected, Tensor) else self.expected()
        actual, expected = self.actual.detach().cpu(), expected.detach().cpu()
        bound = self.bound or 0.0
        error = share_of_wrong(actual, expected) if self.bound is None else relative_error(actual, expected)
        # written so that NaN is an error
        return {"kernel": self.kernel, "case": self.case, "error": error, "bound": bound, "ok": error <= bound}


def share_of_wrong(actual: Tensor, expected: Tensor) -> float:
    return float((actual != expected).double().mean())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error in float64, relative to the largest expected value."""
    actual, expected = actual.double(), expected.double()
    differ = actual != expected  # an expected infinity is no error, a NaN always is
    if not differ.any():
        return 0.0
    return float((actual - expected)[differ].abs().max() / expected[expected.isfinite()].abs().max())


def close(kernel: str, case: str, actual: Tensor, expected: Tensor | Callable[[], Tensor], bound: float) -> Comparison:
    """Compare with a float64 reference: the largest error, relative to the reference's largest value."""
    return Comparison(kernel, case, actual, expected, bound)


def same(kernel: str, case: str, actual: Tensor, expected: Tensor | Callable[[], Tensor]) -> Comparison:
    """Compare bit for bit: the share of elements that differ; none may."""
    return Comparison(kernel, case, actual, expected, None)


@dataclass(frozen=True)
class Timing:
    """The median time of `call(*args)` with cold caches; it must read and write at least `moved` bytes.

    `ms` is that of a replayed CUDA graph, which leaves out the host, and `launched_ms` that of the same call launched
    one kernel after another, with the gaps that this leaves. A call that is not captured, because the host reads what
    it computes or it runs a backward pass, has only the latter, as both. On a CPU only one call is timed: the
    interpreter's time has no meaning, but the call must work.
    """

    kernel: str
    case: str
    device: torch.device
    moved: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    capture: bool

    def launch(self) -> None:
        self.call(*self.args)

    def line(self) -> dict[str, Any]:
        entry = {"kernel": self.kernel, "case": self.case, "bytes": self.moved}
        begin = time.perf_counter()
        self.launch()
        if self.device.type != "cuda":
            return entry | {"ms": 1000 * (time.perf_counter() - begin)}
        launched = median_ms(self.launch, self.device)
        entry |= {"ms": launched, "launched_ms": launched, "graph": self.capture}
        if self.capture:
            try:
                entry["ms"] = replayed_ms(self.launch, self.device)
            except RuntimeError as error:  # a time with the host's gaps is better than none
                entry["graph"] = str(error)[:200]
        return entry


def timed(
    kernel: str,
    case: str,
    device: torch.device,
    moved: int,
    call: Callable[..., Any],
    *args: Any,
    capture: bool = True,
) -> Timing:
    return Timing(kernel, case, device, moved, call, args, capture)


def replayed_ms(launch: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a CUDA graph of the launch, which has been made once before."""
    return median_ms(captured(launch, device)[0].replay, device)


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
    entry = timed("copy", "", device, 2 * size, torch.empty_like(source).copy_, source).line()
    return entry["bytes"] / entry["ms"] / 1e6


def shortest_ms(device: torch.device) -> float:
    """Return the time of a call that does next to nothing: what a short kernel's time contains beside the kernel's."""
    return timed("", "", device, 0, torch.zeros(1, device=device).add_, 1).line()["ms"]


def rated(entry: dict[str, Any], copy_gb_s: float) -> dict[str, Any]:
    """Return the entry with the bandwidth it reached and its share of a plain copy's bandwidth."""
    reached = entry["bytes"] / entry["ms"] / 1e6
    return entry | {"gb_s": round(reached, 2), "of_copy": round(reached / copy_gb_s, 4)}
