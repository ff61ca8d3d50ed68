"""Recurrent layers in the fused decoder (kernels/decoder.py): what C reads of their weights, states and inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.declarations import copied, structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, threads
from kernels.linear import PackedLinear, linear_arguments
from kernels.recurrence import MOST_TAPS, ConvolveArguments, ScanArguments
from kernels.recurrent_rows import RecurrentRows

DeltaNet = structure("delta_net")  # of recurrence.h


class DeltaParts(NamedTuple):
    """A gated delta net behind a convolution of its queries, keys and values (models/mixers/delta_net.py)."""

    z: PackedLinear
    ba: PackedLinear
    A_log: Tensor  # [H] fp32
    dt_bias: Tensor  # [H] fp32
    norm: Tensor  # [V]
    eps: float
    groups: int
    key_size: int


class Kept(NamedTuple):
    """What the L recurrent layers of a decoder read of R rows; the last two are of delta nets."""

    inputs: Tensor  # [L, R, C] of the convolutions
    outputs: Tensor | None  # [L, R, C]
    gates: Tensor | None  # [L, 2, R, H] decays and gains, fp32

    def rows(self, index: Tensor) -> Kept:
        """Return what was read of the rows `index`."""
        inputs, *others = (each if each is None else each.index_select(-2, index) for each in self)
        assert inputs is not None
        return Kept(inputs, *others)


class States(NamedTuple):
    """The states of a hybrid's L recurrent layers, and how a call's rows follow them (kernels/recurrence.py)."""

    rows: RecurrentRows
    windows: Tensor  # [L, S, K - 1, C]
    matrices: Tensor | None  # [L, S, H, K, V]


def recurrent_runs_in_c(conv: Tensor | None, delta: DeltaParts | None, dtype: torch.dtype) -> bool:
    """Return whether C supports such a layer; True for one of attention."""
    if conv is None:
        return True
    if conv.dtype not in KINDS or len(conv) > MOST_TAPS or conv.shape[1] % LANES:
        return False
    if delta is None:
        return True
    sizes, fp32 = (delta.key_size, len(delta.norm)), (delta.A_log.dtype, delta.dt_bias.dtype, delta.ba.out_dtype)
    return not any(size % LANES for size in sizes) and {*fp32} == {torch.float32} and delta.norm.dtype is dtype


class RecurrentWeights:
    """What C reads of the recurrent layers of a decoder; `weights`: by their index among all `layers`."""

    def __init__(self, weights: Mapping[int, tuple[Tensor, DeltaParts | None]], layers: int) -> None:
        lib = library()
        assert lib is not None
        self._scan_scratch, self._replay = lib.scan_scratch, lib.replay
        self._weights, self._layers = list(weights), layers
        self._convolutions = {i: _convolution(conv, silu=delta is not None) for i, (conv, delta) in weights.items()}
        self._deltas = {i: _delta_net(delta) for i, (_, delta) in weights.items() if delta is not None}
        heads, values = max(((d.heads, d.heads * d.values) for d, _ in self._deltas.values()), default=(0, 0))
        self.widths = {"z": values, "scanned": values, "ba": 2 * heads}

    def bind(self, layers: ctypes.Array[ctypes.Structure], arguments: ctypes.Structure) -> None:
        """Set the fields of the recurrent ones of a decoder's layers; keep its arguments for replays."""
        self._arguments = arguments
        for i, convolution in self._convolutions.items():
            layers[i].causal_conv = ctypes.addressof(convolution)
        for i, (delta, _) in self._deltas.items():
            layers[i].delta = ctypes.addressof(delta)

    def buffers(self, rows: int, states: States, *, keep: bool) -> Kept:
        """Allocate what C writes of so many rows; layers share it if it need not be `keep`t."""
        windows, layers = states.windows, len(self._weights)
        shape = (layers if keep else 1), rows, windows.shape[-1]
        inputs = torch.empty(shape, dtype=windows.dtype).expand(layers, -1, -1)
        if states.matrices is None:
            return Kept(inputs, None, None)
        gates = torch.empty(shape[0], 2, rows, states.matrices.shape[2]).expand(layers, -1, -1, -1)
        return Kept(inputs, torch.empty(shape, dtype=windows.dtype).expand(layers, -1, -1), gates)

    def begin(self, a: ctypes.Structure, states: States, kept: Kept) -> tuple[object, ...]:
        """Set the arguments of a call, whose rows and threads are set. Returns the objects to keep alive meanwhile."""
        rows, windows, matrices = states
        recurrent, scan = ConvolveArguments(**rows.fields, parents=address(rows.parents)), None
        a.recurrent = ctypes.addressof(recurrent)
        if matrices is not None:
            visits, places = rows.visits
            scratch = torch.empty(a.threads * self._scan_scratch(*matrices.shape[-2:], places))
            fields = {"visits": address(visits), "rows": a.rows, "places": places, "scratch": scratch.data_ptr()}
            scan = ScanArguments(**rows.fields, **fields), scratch
            a.scan = ctypes.addressof(scan[0])
        tensors = {"windows": windows, "states": matrices, **kept._asdict()}
        pointers = {name: self._pointers(tensor) for name, tensor in tensors.items() if tensor is not None}
        for name, array in pointers.items():
            setattr(a, name, ctypes.addressof(array))
        return pointers, kept, recurrent, scan

    def replay(self, states: States, kept: Kept) -> None:
        """Advance the states along rows of which `kept` is what they read."""
        _, rows, channels = kept.inputs.shape
        attended, scanned = torch.empty(rows * channels), torch.empty(rows * self.widths["scanned"])
        work = kept.inputs.numel() if states.matrices is None else 2 * rows * states.matrices[:, 0].numel()
        fields = {"attended": attended.data_ptr(), "scanned": scanned.data_ptr(), "rows": rows}
        a = copied(self._arguments, fields | {"threads": threads(work)})
        keepalive = self.begin(a, states, kept)
        self._replay(ctypes.addressof(a))
        del keepalive

    def _pointers(self, tensor: Tensor) -> ctypes.Array[ctypes.c_void_p]:
        """Return where the parts of `tensor` `[L, ...]` begin, by the index of their layers."""
        assert tensor[0].is_contiguous()
        base, step, pointers = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize, (ctypes.c_void_p * self._layers)()
        for nth, i in enumerate(self._weights):
            pointers[i] = base + nth * step
        return pointers


def _convolution(weight: Tensor, *, silu: bool) -> ctypes.Structure:
    assert weight.is_contiguous()
    taps, channels = weight.shape
    fields = {"weight_kind": KINDS[weight.dtype], "taps": taps, "channels": channels, "silu": silu}
    return ConvolveArguments(weight=weight.data_ptr(), **fields)


def _delta_net(parts: DeltaParts) -> tuple[ctypes.Structure, tuple[object, ...]]:
    """Return what C reads of a delta net, and the weights that it points to."""
    projections = [linear_arguments(linear) for linear in (parts.z, parts.ba)]
    pointers = dict(zip(("z", "ba"), map(ctypes.addressof, projections), strict=True))
    pointers |= {"a_log": parts.A_log.data_ptr(), "dt_bias": parts.dt_bias.data_ptr(), "norm": parts.norm.data_ptr()}
    sizes = {
        "heads": len(parts.A_log),
        "groups": parts.groups,
        "keys": parts.key_size,
        "values": len(parts.norm),
        "eps": parts.eps,
    }
    return DeltaNet(**pointers, **sizes), (projections, parts)
