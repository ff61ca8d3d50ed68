"""The tensors of a checkpoint with quantized layers, under the names of an ordinary one: each layer has a `weight`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.weights import groups
from kernels.weights.groups import GroupedRows
from models.quantized.scheme import SECTION, Scheme
from models.stacked_experts import open_weights
from models.weights import LazyTensors, NamedTensors, Rows


def why_unread(folder: Path, scheme: Scheme, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why kernels cannot read a checkpoint's layers as they are stored, None if they can. Reads no weights."""
    tensors = QuantizedTensors(scheme, folder)
    reasons = (groups.why_unread(tensors.described(name), dtype, device) for name in tensors.layers)
    return next((reason for reason in reasons if reason is not None), None)


class StoredParts(Mapping[str, Tensor]):
    """The stored tensors of a layer without the layer's name, each read on access."""

    def __init__(self, layer: str, names: tuple[str, ...], tensors: LazyTensors) -> None:
        self._layer, self._tensors = layer, tensors
        self._names = [name for name in names if f"{layer}.{name}" in tensors]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{self._layer}.{name}"]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class QuantizedTensors(NamedTensors):
    """Tensors by name, read on access; those of quantized layers as they are stored, or rounded once to `dtype`.

    Raises ValueError for layers that do not fit the scheme, and on access for what is damaged.
    """

    def __init__(
        self, scheme: Scheme, folder: Path, dtype: torch.dtype = torch.float32, rows: Rows | None = None
    ) -> None:
        """`rows` selects each tensor's rows."""
        tensors = open_weights(folder)  # all rows: packed tensors have other rows than the weight
        self._scheme, self._tensors, self._dtype, self._rows, self._source = scheme, tensors, dtype, rows, str(folder)
        mark = f".{scheme.parts[0]}"
        layers = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
        if not layers:
            raise ValueError(
                f"{folder}: {SECTION}: {scheme.name}: no tensor is called *{mark}; these weights are not of that format"
            )
        self.layers = {f"{layer}.weight": StoredParts(layer, scheme.parts, tensors) for layer in layers}
        for layer in layers:
            if "weight" not in scheme.parts and f"{layer}.weight" in tensors:
                raise ValueError(f"{folder}: {layer}.weight: is there beside {layer}{mark}")
        hidden = {f"{layer}.{part}" for layer in layers for part in scheme.parts}
        self._sources = dict.fromkeys([*(name for name in tensors if name not in hidden), *self.layers])

    def __getitem__(self, name: str) -> Tensor:
        stored = self.groups(name)
        value = self._tensors[name] if stored is None else stored.widened().to(self._dtype)
        row_range = self._rows(name, len(value)) if self._rows is not None and value.dim() else None
        return value if row_range is None else value[row_range[0] : row_range[1]].clone()

    def shape(self, name: str) -> Sequence[int]:
        if name not in self.layers:
            return self._tensors.shape(name)
        rows = self.described(name)
        return rows.count, rows.inputs

    def slice(self, name: str) -> Any:
        """As of LazyTensors, of a tensor of no quantized layer."""
        return self._tensors.slice(name)

    def groups(self, name: str) -> GroupedRows | None:
        """Return a layer's weight as it is stored, all rows; None for another tensor."""
        if name not in self.layers:
            return None
        rows = self.described(name)
        for part, tensor in self.layers[name].items():
            if tensor.is_floating_point() and part != "weight":
                self._check_scales(f"{name.removesuffix('weight')}{part}", tensor)
        return rows

    def described(self, name: str) -> GroupedRows:
        """Return a layer's weight without a look at its numbers."""
        layer = name.removesuffix(".weight")
        try:
            rows = self._scheme.read(layer, self.layers[name])
        except ValueError as error:
            raise ValueError(f"{self._source}: {layer}: {self._scheme.name}: {error}") from error
        return replace(rows, source=f"{self._source}: {layer}")

    def _check_scales(self, name: str, scales: Tensor) -> None:
        """Raise ValueError naming tensor and place for a scale that is not finite."""
        finite = scales.reshape(-1).isfinite()
        if not bool(finite.all()):
            file, first = self._tensors.place(name)
            place = first + int(finite.int().argmin()) * scales.element_size()
            raise ValueError(
                f"{file}: {name}: damaged: the scale at byte {place:,} is no finite number; copy or download the file "
                "again"
            )
