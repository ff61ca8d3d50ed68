"""The state of the simulated machine: its current device, what the host has waited for, and the graph being captured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.simulated_cuda.graphs import Recording, SimulatedGraph

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("kernels", "models", "infer", "train"))
OUTSIDE = "outside the product"


class SimulatedCudaError(BaseException):
    """What a real device would answer by an error, by a wrong value or by nothing at all."""


class DeviceMix(SimulatedCudaError):
    """Operands are not all on one device, or a kernel is launched on another device than its tensors'."""


class CaptureError(SimulatedCudaError):
    """The host waits for the device, or uploads to it, while a graph is being captured."""


class HostRace(SimulatedCudaError):
    """The host touches pinned memory before an asynchronous copy from or to it is known to be done."""


class UnknownOperation(SimulatedCudaError):
    """The simulation does not know what an operation does on a device (tests/simulated_cuda/operations.py)."""


class Wait(NamedTuple):
    """A kind of wait of the host, and where the product asks for it."""

    place: str  # file and function
    kind: str  # "read", "upload", "event" or "synchronize"


class Copy(NamedTuple):
    """An asynchronous copy between pinned memory and a device."""

    number: int  # among all copies, in the order of the stream
    device: int
    first: int  # address in host memory
    last: int
    writes: bool  # the host memory


class Machine:
    """Simulated GPUs, each with one stream. `computed`: names of the Triton kernels that are computed; None: all."""

    def __init__(self, devices: int, computed: Collection[str] | None) -> None:
        self.devices, self.current, self.computed = devices, 0, computed
        self.capture: Recording | None = None
        self.pools: dict[object, list[SimulatedGraph]] = {}  # graphs by the memory that they share
        self.waits: Counter[Wait] = Counter()
        self.launches: Counter[str] = Counter()  # of Triton kernels
        self._pinned: dict[int, object] = {}  # storages by address, which they so keep
        self._copies: list[Copy] = []
        self.issued = 0  # copies so far

    # ---- waits --------------------------------------------------------------------------------------------------

    def wait(self, kind: str, device: int | None = None) -> None:
        """Count a wait of the host until all that was queued on a device, or on all, is done.

        Raises CaptureError while a graph is captured.
        """
        self.event(device, self.issued, kind)

    def event(self, device: int | None, number: int, kind: str = "event") -> None:
        """Count a wait until all up to the copy `number` is done."""
        wait = Wait(place(), kind)
        if self.capture is not None:
            raise CaptureError(f"{wait.kind} at {wait.place} while a graph is captured")
        self.waits[wait] += 1
        self._copies = [copy for copy in self._copies if device not in (None, copy.device) or copy.number > number]

    @contextmanager
    def counting(self) -> Iterator[Counter[Wait]]:
        """Yield a counter that holds the waits inside the block once it has ended."""
        before, inside = self.waits.copy(), Counter[Wait]()
        yield inside
        inside.update(self.waits - before)

    @property
    def computes_all(self) -> bool:
        return self.computed is None

    def computes(self, kernel: str) -> bool:
        return self.computed is None or kernel in self.computed

    # ---- pinned memory ------------------------------------------------------------------------------------------

    def pin(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return host

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    @property
    def copying(self) -> bool:
        """Whether a copy may still be under way."""
        return bool(self._copies)

    def copied(self, host: Tensor, device: int, *, writes: bool) -> None:
        """Note that a copy from, or with `writes` to, pinned memory was queued on a device. No captures."""
        if self.capture is not None:
            raise CaptureError(f"a copy from or to the host at {place()} while a graph is captured")
        self.issued += 1
        first = host.data_ptr()
        self._copies.append(Copy(self.issued, device, first, first + extent(host), writes))

    def check_host(self, host: Tensor, *, writes: bool) -> None:
        """Raises HostRace if memory of the host is touched that a queued copy writes, or written that one reads."""
        first = host.data_ptr()
        last = first + extent(host)
        for copy in self._copies:
            if copy.first < last and first < copy.last and (writes or copy.writes):
                raise HostRace(f"{place()} touches pinned memory that a copy, not waited for, reads or writes")


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 if tensor.numel() == 0 else (steps + 1) * tensor.element_size()


def place() -> str:
    """Return the file and the function of the product in which the program is."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PRODUCT):
            return f"{Path(code.co_filename).relative_to(ROOT).as_posix()} {code.co_qualname.replace('.<locals>', '')}"
        frame = frame.f_back
    return OUTSIDE


_installed: list[Machine] = []


def machine() -> Machine:
    """Return the machine that is installed."""
    assert _installed, "tensors of a simulated device are used after it was removed"
    return _installed[-1]


@contextmanager
def installed(one: Machine) -> Iterator[None]:
    assert not _installed, "a simulated device is installed already"
    _installed.append(one)
    try:
        yield
    finally:
        _installed.clear()


def index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a CUDA device, the current one if it has none. Raises ValueError where there is none."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    index = machine().current if index is None else index
    if not 0 <= index < machine().devices:
        raise ValueError(f"cuda:{index}: the simulated machine has {machine().devices} devices")
    return index
