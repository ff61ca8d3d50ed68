"""The simulated device itself: what it must refuse, what it must count, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from triton.runtime.interpreter import InterpretedFunction

from infer.batch.tree import DraftTree
from kernels.copies import upload
from kernels.triton.elementwise import rms_norm
from tests.simulated_cuda.install import simulated_cuda
from tests.simulated_cuda.machine import (
    OUTSIDE,
    CaptureError,
    DeviceMix,
    HostRace,
    Machine,
    UnknownOperation,
    Wait,
    place,
)
from tests.simulated_cuda.tensor import CudaTensor


@pytest.fixture
def machine() -> Iterator[Machine]:
    with simulated_cuda() as one:
        yield one


@contextlib.contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        yield graph


def device_rows(index: int = 0) -> Tensor:
    return torch.ones(4, 8, device=f"cuda:{index}")


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x + torch.ones(8),
        lambda x: torch.cat([x, torch.ones(1, 8)]),
        lambda x: torch.ones(4, 8)[x[:, 0] > 0],
        lambda x: x + device_rows(1),
        lambda x: x.index_select(0, torch.zeros(1, dtype=torch.int64)),
        lambda x: rms_norm(x, torch.ones(8), 1e-5),
        lambda x: rms_norm(x, torch.ones(8, device="cuda:1"), 1e-5),
    ],
    ids=["add", "cat", "index on the host", "two devices", "host index", "kernel with a host tensor", "kernel of two"],
)
def test_mixed_devices_are_refused(machine: Machine, fault: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DeviceMix):
        fault(device_rows())


def test_a_kernel_runs_on_the_current_device_only(machine: Machine) -> None:
    x, weight = device_rows(1), torch.ones(8, device="cuda:1")
    with pytest.raises(DeviceMix, match="current device is cuda:0"):
        rms_norm(x, weight, 1e-5)
    with torch.cuda.device(1):
        assert rms_norm(x, weight, 1e-5).device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


def test_a_device_that_is_not_there_is_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match="has 2 devices"):
        torch.zeros(1, device="cuda:2")


def test_numbers_of_the_host_are_arguments(machine: Machine) -> None:
    total = device_rows() * torch.tensor(3.0) + 1
    assert not machine.waits
    assert (total.device, total.tolist()) == (torch.device("cuda:0"), [[4.0] * 8] * 4)


def test_an_unknown_operation_is_refused(machine: Machine) -> None:
    with pytest.raises(UnknownOperation, match="lgamma"):
        device_rows().lgamma()
    with pytest.raises(UnknownOperation, match="hann_window"):
        torch.hann_window(4, device="cuda")


def test_modules_move_and_keep_their_ties(machine: Machine) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    module.to("cuda:1")
    assert {parameter.device for parameter in module.parameters()} == {torch.device("cuda:1")}
    assert module[1].weight is module[0].weight
    copied = deepcopy(module)
    assert copied[1].weight is copied[0].weight
    assert copied[0].weight.data_ptr() != module[0].weight.data_ptr()
    module(device_rows(1)).sum().backward()
    assert module[0].weight.grad.device == torch.device("cuda:1")


# ---- waits -----------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0, 0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "copy": lambda x: torch.zeros(4, 8).copy_(x),
    "pageable copy": lambda x: torch.zeros(4, 8).copy_(x, non_blocking=True),
    "repeats": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda"), dim=0),
}
UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to": lambda x: torch.ones(3).to("cuda"),
    "pageable": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "strided": lambda x: x.copy_(torch.ones(8, 4, pin_memory=True).T, non_blocking=True),
    "list index": lambda x: x[[0, 2]],
    "host index": lambda x: x[torch.tensor([0, 2])],
    "one element": lambda x: x.__setitem__((0, 0), 5.0),
    "a number by index": lambda x: x.__setitem__(torch.zeros(1, dtype=torch.int64, device="cuda"), 5.0),
}
SILENT: dict[str, Callable[[Tensor], object]] = {
    "slice": lambda x: x.__setitem__((0, slice(0, 1)), 5.0),
    "mask": lambda x: x.__setitem__(x > 0, 5.0),
    "upload": lambda x: upload([1, 2], x.device),
    "pinned": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "results": lambda x: torch.empty(4, 8, pin_memory=True).copy_(x, non_blocking=True),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device="cuda")],
    "shape": lambda x: x.reshape(2, 16).shape,
}


@pytest.mark.parametrize("kind", ["read", "upload"])
def test_waits_are_counted(machine: Machine, kind: str) -> None:
    for name, work in (READS if kind == "read" else UPLOADS).items():
        x = device_rows()
        with machine.counting() as waits:
            work(x)
        assert [(wait.kind, count) for wait, count in waits.items()] == [(kind, 1)], name


def test_what_does_not_wait_is_not_counted(machine: Machine) -> None:
    for name, work in SILENT.items():
        x = device_rows()
        with machine.counting() as waits:
            work(x)
        assert not waits, name


@pytest.mark.parametrize("work", [*READS.values(), *UPLOADS.values()], ids=[*READS, *UPLOADS])
def test_nothing_waits_in_a_capture(machine: Machine, work: Callable[[Tensor], object]) -> None:
    x = device_rows()
    with pytest.raises(CaptureError), capturing():
        work(x)
    assert machine.capture is None


def test_no_copy_of_the_host_is_captured(machine: Machine) -> None:
    with pytest.raises(CaptureError, match="a copy from or to the host"), capturing():
        upload([1, 2], torch.device("cuda"))


def test_the_place_of_a_wait_is_the_products(machine: Machine) -> None:
    roots, drafted, counts = (torch.zeros(*size, dtype=torch.int64, device="cuda") for size in ((1,), (1, 2), (1,)))
    tree = DraftTree.chain(roots, drafted, counts)
    with machine.counting() as waits:
        assert not tree.full
    assert waits == {Wait("infer/batch/tree.py DraftTree.full", "read"): 1}
    assert place() == OUTSIDE


# ---- graphs and pinned memory ----------------------------------------------------------------------------------------


def test_a_capture_computes_nothing_and_a_replay_what_was_launched(machine: Machine) -> None:
    x, factor = torch.ones(3, device="cuda"), [2]
    with capturing() as graph:
        x += 1
        y = x * factor[0]
    assert x.tolist() == [1, 1, 1]
    factor[0] = 5  # too late
    for round in (2, 3):
        graph.replay()
        assert (x.tolist(), y.tolist()) == ([round] * 3, [2 * round] * 3)


def test_kernels_are_replayed_on_the_same_memory(machine: Machine) -> None:
    x, weight = device_rows(), torch.ones(8, device="cuda")
    with capturing() as graph:
        normed = rms_norm(x, weight, 0.0)
    x.fill_(-3)
    graph.replay()
    assert normed.tolist() == [[-1.0] * 8] * 4


def test_memory_of_one_graph_is_lost_in_another(machine: Machine) -> None:
    x, pool = torch.ones(3, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    outputs = []
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            outputs.append(x * 2)
    graphs[0].replay()
    assert outputs[0].tolist() == [2, 2, 2]
    graphs[1].replay()
    assert all(map(math.isnan, outputs[0].tolist()))


def test_pinned_memory_is_touched_only_after_the_copy(machine: Machine) -> None:
    x, host = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    with pytest.raises(HostRace):
        host.tolist()
    event.record()
    event.synchronize()
    assert host.tolist() == [1, 1, 1]
    x.copy_(host, non_blocking=True)
    assert host.tolist() == [1, 1, 1]  # reading beside a reader
    with pytest.raises(HostRace):
        host.zero_()
    x.sum().item()  # waits for everything before it
    host.zero_()


def test_an_event_marks_the_current_device(machine: Machine) -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device="cuda:1"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()  # on cuda:0
    event.synchronize()
    with pytest.raises(HostRace):
        host.tolist()


# ---- installation ----------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_KERNELS", "triton")
    watched: list[tuple[object, str]] = [
        (InterpretedFunction, "run"),
        (torch, "Generator"),
        (torch.inference_mode, "__enter__"),
        *((torch.cuda, name) for name in ("is_available", "Event", "CUDAGraph", "graph", "set_device", "synchronize")),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    with contextlib.suppress(KeyError), simulated_cuda():
        assert torch.cuda.is_available()
        assert "HEADWAY_KERNELS" not in os.environ
        raise KeyError
    assert [getattr(owner, name) for owner, name in watched] == before
    assert not torch.cuda.is_available()
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert os.environ["HEADWAY_KERNELS"] == "triton"
    assert type(torch.ones(1) + 1) is Tensor
    with torch.inference_mode():
        assert torch.ones(1).is_inference()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_only_one_machine_is_installed(machine: Machine) -> None:
    assert isinstance(torch.zeros(1, device="cuda"), CudaTensor)
    with pytest.raises(AssertionError, match="installed already"), simulated_cuda():
        pass
    assert torch.cuda.is_available()
