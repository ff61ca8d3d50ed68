"""Installs the simulated machine: inside `simulated_cuda()` the product finds CUDA devices, afterwards nothing is left.

What is replaced are torch.cuda's functions, the launch of Triton's interpreter, and inference mode, in which wrapper
tensors cannot be made and which no_grad stands for. It is per process, not per thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from triton.runtime.interpreter import InterpretedFunction

from kernels.triton import SWITCH
from kernels.triton.device import HOPPER
from tests.simulated_cuda.graphs import SimulatedGraph
from tests.simulated_cuda.machine import DeviceMix, Machine, index_of, installed, machine, place
from tests.simulated_cuda.tensor import CudaTensor, Transfers

GB = 2**30


@contextmanager
def simulated_cuda(*, devices: int = 2, computed: Collection[str] | None = None) -> Iterator[Machine]:
    """Install a machine of so many devices. `computed`: the Triton kernels that are computed, by name; None: all.

    The launches of others are only checked, which takes a hundredth of the time; what they would write is zero.
    """
    one = Machine(devices, computed)
    with ExitStack() as stack:
        for target, replacements in REPLACEMENTS:
            for name, value in replacements.items():
                stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(os.environ))
        os.environ.pop(SWITCH, None)  # kernels run in Triton on devices, and only there
        stack.enter_context(patch("kernels.triton.device._limits_of_gpu", lambda device: HOPPER))
        # Parameters stay the same objects when a module moves, so that tied ones stay tied.
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swapping)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(installed(one))
        stack.enter_context(Transfers())
        yield one


# ---- streams and events -----------------------------------------------------------------------------------------------


class Stream:
    """The only stream of a device: what is launched is done in order."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device("cuda", index_of(device))

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        machine().wait("synchronize", self.device.index)


class Event:
    def __init__(self, **options: Any) -> None:
        self._at: tuple[int, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark what is queued on the current device, or on the stream's, so far."""
        self._at = machine().current if stream is None else stream.device.index, machine().issued

    def synchronize(self) -> None:
        """Wait for what was marked."""
        assert self._at is not None, "the event was not recorded"
        machine().event(*self._at)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Generator(torch.Generator):
    """Random numbers of the host or of a device; their bits are those of the host."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator = super().__new__(cls)
        generator._place = torch.device(device)
        if generator._place.type == "cuda":
            generator._place = torch.device("cuda", index_of(generator._place))
        return generator

    device = property(lambda self: self._place)


@contextmanager
def current_device(device: Any) -> Iterator[None]:
    """Make a device the current one; a negative index or None changes nothing."""
    before = machine().current
    if device is not None and device != -1:
        machine().current = index_of(device)
    try:
        yield
    finally:
        machine().current = before


def set_device(device: Any) -> None:
    machine().current = index_of(device)


def capture(graph: SimulatedGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
    return graph.captured(pool)


def launch(function: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Launch a Triton kernel: all its tensors must be on the current device."""
    name, tensors = function.fn.__name__, pytree.tree_leaves((args, options))
    devices = [x.device for x in tensors if isinstance(x, Tensor)]
    current = torch.device("cuda", machine().current)
    if any(device != current for device in devices):
        raise DeviceMix(f"kernel {name} at {place()}: tensors on {[*map(str, devices)]}, the current device is {current}")
    machine().launches[name] += 1
    if not machine().computes(name):
        return
    on_host = pytree.tree_map_only(CudaTensor, lambda tensor: tensor.host, (args, options))

    def run() -> None:
        with torch._C.DisableTorchFunction():
            interpret(function, *on_host[0], grid=grid, warmup=warmup, **on_host[1])

    recording = machine().capture
    if recording is None:
        run()
    else:
        recording.calls.append(run)


interpret = InterpretedFunction.run


# ---- inference mode ---------------------------------------------------------------------------------------------------


def enter(mode: inference_mode) -> None:
    mode._inference_mode_context = torch.no_grad() if mode.mode else contextlib.nullcontext()
    mode._inference_mode_context.__enter__()


def leave(mode: inference_mode, *error: Any) -> None:
    mode._inference_mode_context.__exit__(*error)


REPLACEMENTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (InterpretedFunction, {"run": launch}),
    (inference_mode, {"__enter__": enter, "__exit__": leave}),
    (torch, {"Generator": Generator}),
    (
        torch.cuda,
        {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": SimulatedGraph,
            "graph": capture,
            "graph_pool_handle": lambda: object(),
            "current_stream": lambda device=None: Stream(device),
            "stream": lambda stream: contextlib.nullcontext(),
            "device": current_device,
            "set_device": set_device,
            "current_device": lambda: machine().current,
            "device_count": lambda: machine().devices,
            "is_available": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "synchronize": lambda device=None: machine().wait("synchronize", index_of(device)),
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (70 * GB, 80 * GB),
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "get_device_name": lambda device=None: "simulated GPU",
            "get_device_properties": lambda device=None: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        },
    ),
)
