"""Tensors of a simulated CUDA device: their memory is the host's, and every operation on them is checked.

To torch's C++ they are tensors of the CPU, so that autograd works; Python, and so the product, sees a CUDA device.
`CudaTensor.__torch_dispatch__` sees every operation on them. `Transfers` sees what torch would refuse to do before any
operation is called, since this build of it knows no CUDA: allocation on a device, copies to it, pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.simulated_cuda import operations
from tests.simulated_cuda.graphs import spoil, tensors_in
from tests.simulated_cuda.machine import DeviceMix, UnknownOperation, index_of, machine, place

CPU = torch.device("cpu")


class CudaTensor(Tensor):
    """A tensor of the device `index`, with its values in `host`."""

    host: Tensor
    index: int

    @staticmethod
    def __new__(cls, host: Tensor, index: int) -> CudaTensor:
        assert not isinstance(host, CudaTensor)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CPU
        )
        tensor.host, tensor.index = host.detach(), index
        return tensor

    def __init__(self, host: Tensor, index: int) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return self.index

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        machine().wait("read", self.index)
        return self.host.tolist()

    def cpu(self, memory_format: Any = None) -> Tensor:
        return moved(self, "cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:
        return moved(self, torch.device("cuda", index_of(device)))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return moved(self, *args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"{self.device} tensors have no numpy()")

    __array__ = numpy

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = CudaTensor(self.host.clone(), self.index)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    def __repr__(self, **options: Any) -> str:
        return f"CudaTensor({self.host}, index={self.index})"


# ---- operations -----------------------------------------------------------------------------------------------------


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check and compute, or record, an operation of ATen with at least one tensor of a device among its operands."""
    name, operands = plain_name(func._schema), tensors_in((args, kwargs))
    if name == "copy":
        return copy(*args, **kwargs)
    if name in operations.INDEXING:
        index = check_indexing(name, *args, **kwargs)
    elif name in operations.ELEMENTWISE:
        index = common_device(name, operands, numbers=True)
    elif name in operations.WHOLE or (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        index = common_device(name, operands, numbers=False)
    elif name in operations.READS:
        index = common_device(name, operands, numbers=False)
        machine().wait("read", index)
    else:
        raise UnknownOperation(f"{func} at {place()}: say in tests/simulated_cuda/operations.py whether it waits")
    return launch(func, name, index, args, kwargs)


def launch(func: Any, name: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the values of its operands, or record it if a graph is captured."""
    capture, mutated = machine().capture, written(func._schema, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": CPU}  # C++ passes on the device that it sees
    on_host = pytree.tree_map_only(Tensor, host_operand if capture is None else recorded_operand, (args, kwargs))
    if capture is None or name in operations.VIEWS:
        out = filled(name, func(*on_host[0], **on_host[1]))
    elif mutated:
        capture.calls.append(lambda: func(*on_host[0], **on_host[1]))
        out = None
    else:
        out = capture.add(func, *on_host, computes=name not in operations.UNFILLED)
    if mutated:
        return mutated[0] if len(mutated) == 1 else tuple(mutated)
    return pytree.tree_map_only(Tensor, lambda host: CudaTensor(host, index), out)


def filled(name: str, result: Any) -> Any:
    """Return the result of an operation, in which memory that was only allocated holds what no computation expects."""
    return spoil(result) if name in operations.UNFILLED else result


def plain_name(schema: Any) -> str:
    """Return the name of an operation, which an in-place form shares."""
    name = schema.name.split("::")[1]
    if not schema.is_mutable:
        return name
    return f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")


def written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the operands that an operation changes and returns."""
    if not schema.is_mutable:
        return []
    changed = [(place, a) for place, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [args[place] if place < len(args) else kwargs[a.name] for place, a in changed]


def host_operand(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, CudaTensor) else tensor


def recorded_operand(tensor: Tensor) -> Tensor:
    """Return an operand for replays: a number of the host keeps the value that the launch was given."""
    return tensor.host if isinstance(tensor, CudaTensor) else tensor.clone()


def common_device(name: str, operands: Sequence[Tensor], *, numbers: bool) -> int:
    """Return the index of the device of all operands; with `numbers` some without dimensions may be the host's."""
    indices = {operand.index for operand in operands if isinstance(operand, CudaTensor)}
    on_host = [tuple(x.shape) for x in operands if not isinstance(x, CudaTensor) and not (numbers and x.dim() == 0)]
    if on_host or len(indices) != 1:
        devices = [f"cuda:{index}" for index in sorted(indices)]
        raise DeviceMix(f"{name} at {place()}: operands on {', '.join(devices)}; on the host those of sizes {on_host}")
    return indices.pop()


def check_indexing(
    name: str, values: Tensor, indices: Sequence[Tensor | None], new: Tensor | None = None, *others: Any, **more: Any
) -> int:
    """Return the index of the device of an indexed tensor; count the waits that its indices and new values cost."""
    used = [index for index in indices if index is not None]
    on_device = [x for x in (values, *used, new) if isinstance(x, CudaTensor)]
    index = common_device(name, on_device, numbers=False)
    if not isinstance(values, CudaTensor) or (new is not None and not isinstance(new, CudaTensor) and new.dim()):
        raise DeviceMix(f"{name} at {place()}: what is indexed, or what is written, is on the host")
    for _ in (one for one in used if not isinstance(one, CudaTensor)):
        machine().wait("upload", index)
    masks = [one for one in used if one.dtype in (torch.bool, torch.uint8)]
    number = new is not None and not isinstance(new, CudaTensor)
    if number and len(used) == 1 and masks:
        return index  # a masked fill
    for _ in masks:
        machine().wait("read", index)  # of the number of true entries
    if number:
        machine().wait("upload", index)
    return index


# ---- copies ---------------------------------------------------------------------------------------------------------


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values between devices and the host, or within one."""
    if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
        if target.index != source.index:
            machine().wait("read", source.index)
        run = target.host.copy_
        if machine().capture is None:
            run(source.host)
        else:
            machine().capture.calls.append(lambda values=source.host: run(values))
        return target
    upload = isinstance(target, CudaTensor)
    host = source if upload else target
    index = target.index if isinstance(target, CudaTensor) else source.index  # type: ignore[attr-defined]
    same = target.dtype == source.dtype or upload
    transfer(host, index, writes=not upload, asynchronous=non_blocking and same)
    host_operand(target).copy_(host_operand(source))
    return target


def transfer(host: Tensor, index: int, *, writes: bool, asynchronous: bool) -> None:
    """Count a copy between the memory `host` and a device, which waits unless that memory is pinned."""
    if asynchronous and machine().is_pinned(host) and host.is_contiguous():
        machine().copied(host, index, writes=writes)
    else:
        machine().check_host(host, writes=writes)
        machine().wait("read" if writes else "upload", index)


def moved(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Return `tensor.to(...)`, where the tensor or the target may be on a device."""
    if args and isinstance(args[0], Tensor):
        args = args[0].device, args[0].dtype, *args[1:]
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    dtype, device = dtype or tensor.dtype, tensor.device if device is None else torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", index_of(device))
    if device == tensor.device:
        return torch.Tensor.to(tensor, dtype, copy=copy) if copy or dtype != tensor.dtype else tensor
    with torch._C.DisableTorchFunction():
        if device.type == "cuda" and not isinstance(tensor, CudaTensor):
            transfer(tensor, device.index, writes=False, asynchronous=non_blocking)
            return CudaTensor(tensor.detach().to(dtype, copy=True), device.index)
        assert isinstance(tensor, CudaTensor)
        if device.type == "cuda":
            machine().wait("read", tensor.index)
            return CudaTensor(tensor.host.to(dtype, copy=True), device.index)
        values = tensor.host.to(dtype, copy=True)
        if non_blocking:
            machine().pin(values)
        transfer(values, tensor.index, writes=True, asynchronous=non_blocking)
        return values


# ---- what torch would refuse ------------------------------------------------------------------------------------------


class Transfers(TorchFunctionMode):
    """Allocates on simulated devices, copies to them, and knows which memory of the host is pinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and not isinstance(first, CudaTensor):
            if name == "to":
                return moved(first, *args[1:], **kwargs)
            if name == "cuda":
                return moved(first, torch.device("cuda", index_of(*args[1:2] or [None])))
            if name == "is_pinned":
                return machine().is_pinned(first)
            if name == "pin_memory":
                return machine().pin(first.clone())
            self._check_host(name, args)
        if kwargs.pop("pin_memory", False):
            return machine().pin(func(*args, **kwargs))
        device = kwargs.get("device")
        if device is not None and is_cuda(device) and name != "_parse_to":
            return self._allocate(func, name, index_of(device), args, kwargs)
        if isinstance(first, CudaTensor) and device is not None and name in operations.FACTORIES:
            return func(first.host, *args[1:], **kwargs)  # explicitly on the host
        return func(*args, **kwargs)

    def _allocate(self, func: Callable[..., Any], name: str, index: int, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in operations.UPLOADING_FACTORIES:
            machine().wait("upload", index)
        elif name not in operations.FACTORIES | operations.RANDOM:
            raise UnknownOperation(f"{name}(device=cuda:{index}) at {place()}: not in tests/simulated_cuda/operations.py")
        args, kwargs = pytree.tree_map_only(Tensor, host_operand, (args, kwargs | {"device": CPU}))
        with torch._C.DisableTorchFunction():
            capture = machine().capture
            if capture is None:
                out = filled(name, func(*args, **kwargs))
            else:
                out = capture.add(func, args, kwargs, computes=name not in operations.UNFILLED)
            wanted, values = kwargs.get("requires_grad", False), CudaTensor(out.detach(), index)
            return values.requires_grad_() if wanted else values

    def _check_host(self, name: str, args: Any) -> None:
        """Raises HostRace if a function of a host tensor touches memory that is being copied."""
        if name in operations.HOST_VIEWS or not machine().copying:
            return
        index = args[1] if name == "__getitem__" and len(args) > 1 else None
        if name == "__getitem__" and not any(isinstance(x, (Tensor, list)) for x in (index, *as_tuple(index))):
            return
        for position, tensor in enumerate(x for x in args if isinstance(x, Tensor) and not isinstance(x, CudaTensor)):
            machine().check_host(tensor, writes=position == 0 and name in operations.HOST_WRITES)


def as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else ()


def is_cuda(device: Any) -> bool:
    return not isinstance(device, int) and torch.device(device).type == "cuda"
