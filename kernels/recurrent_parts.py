"""Recurrent layers in the fused decoder (kernels/decoder.py): what C reads of their weights, states and inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address
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
    groups: int
    key_size: int

    def divide(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys `[R, G, K]` and values `[R, H, V]` of the convolution's output `[R, C]`."""
        keys, values = self.groups * self.key_size, len(self.A_log) * len(self.norm)
        q, k, v = qkv.split([keys, keys, values], dim=-1)
        q, k = (x.unflatten(-1, (self.groups, -1)) for x in (q, k))
        return q, k, v.unflatten(-1, (len(self.A_log), -1))


class Kept(NamedTuple):
    """What a recurrent layer read, for replays: arguments of `convolve`, and of a delta net's `scan`."""

    convolved: tuple[Tensor, Tensor, None]
    scanned: tuple[Tensor, ...] | None


class States(NamedTuple):
    """The states of a hybrid's L recurrent layers for one call (kernels/recurrence.py)."""

    rows: RecurrentRows
    windows: Tensor  # [L, S, K - 1, C]
    matrices: Tensor | None  # [L, S, H, K, V]
    kept: list[Kept] | None  # receives what each layer read; None: it is not needed


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
        self._weights, self._layers, self._scan_scratch = weights, layers, lib.scan_scratch
        self._convolutions = {i: _convolution(conv, silu=delta is not None) for i, (conv, delta) in weights.items()}
        self._deltas = {i: _delta_net(delta) for i, (_, delta) in weights.items() if delta is not None}
        heads, values = max(((d.heads, d.heads * d.values) for d, _ in self._deltas.values()), default=(0, 0))
        self.widths = {"z": values, "scanned": values, "ba": 2 * heads}

    def set_pointers(self, layers: ctypes.Array[ctypes.Structure]) -> None:
        """Set the fields of the recurrent ones of a decoder's layers."""
        for i, convolution in self._convolutions.items():
            layers[i].causal_conv = ctypes.addressof(convolution)
        for i, (delta, _) in self._deltas.items():
            layers[i].delta = ctypes.addressof(delta)

    def begin(self, a: ctypes.Structure, states: States) -> tuple[object, ...]:
        """Set the arguments of a call, whose rows and threads are set. Returns the objects to keep alive meanwhile."""
        rows, windows, matrices, kept = states
        assert windows.is_contiguous()
        assert matrices is None or matrices.is_contiguous()
        layers = 1 if kept is None else len(self._weights)
        inputs = torch.empty(layers, a.rows, windows.shape[-1], dtype=windows.dtype)
        outputs, gates, scan = inputs, inputs, None
        if matrices is not None:
            _, _, heads, keys, values = matrices.shape
            visits, places = rows.visits
            outputs, gates = torch.empty_like(inputs), torch.empty(layers, 2, a.rows, heads)
            scratch = torch.empty(a.threads * self._scan_scratch(keys, values, places))
            own = {"visits": address(visits), "rows": a.rows, "places": places, "scratch": scratch.data_ptr()}
            scan = (ScanArguments(**rows.fields, **own), scratch)
            a.scan = ctypes.addressof(scan[0])
        pointers = [(ctypes.c_void_p * self._layers)() for _ in range(5)]
        for nth, (i, (conv, delta)) in enumerate(self._weights.items()):
            read = [each[min(nth, layers - 1)] for each in (inputs, outputs, gates)]
            state = windows[nth], None if matrices is None else matrices[nth]
            for array, tensor in zip(pointers, (*state, *read), strict=True):
                array[i] = address(tensor)
            if kept is not None:
                kept.append(Kept((read[0], conv.t(), None), delta and (*delta.divide(read[1]), *read[2])))
        recurrent = ConvolveArguments(**rows.fields, parents=address(rows.parents))
        a.recurrent = ctypes.addressof(recurrent)
        a.windows, a.states, a.inputs, a.outputs, a.gates = map(ctypes.addressof, pointers)
        return (pointers, inputs, outputs, gates, scan, recurrent)


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
    sizes = {"heads": len(parts.A_log), "groups": parts.groups, "keys": parts.key_size, "values": len(parts.norm)}
    return DeltaNet(**pointers, **sizes), (projections, parts)
