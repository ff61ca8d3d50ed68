"""Packs matrices in groups (groups.py) for Triton, into the tiles of ggml_tiles.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.weights.ggml_tiles import (
    CHUNK,
    PANEL,
    WIDTH,
    GgmlTiles,
    Storage,
    empty_tiles,
    store_integers,
    store_scales,
)
from kernels.weights.groups import GroupedMatrix, GroupedRows, sound_integers

KINDS = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}  # of scales


@dataclass(frozen=True)
class ReadRows:
    """What is read of a part: its integers `[N, K]`, zero points `[N, G]` and order of columns."""

    rows: GroupedRows
    values: Tensor
    zeros: Tensor | None
    order: Tensor | None

    @property
    def storage(self) -> Storage:
        scales = KINDS[self.rows.scales.dtype] + ("" if self.zeros is None else "_zero")
        floats, bits = self.rows.weight_format == "fp8", 4 if self.rows.weight_format == "int4" else 8
        whole_row = self.rows.group == self.rows.inputs
        group = max(self.rows.group, WIDTH) if whole_row else self.rows.group  # so that a short row fills its tile
        return Storage(bits, 0, not floats, group, scales, floats)

    def joins(self, other: ReadRows) -> bool:
        """Return whether one launch can read both, the other below this."""
        if self.storage != other.storage or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)


def pack_group_tiles(matrix: GroupedMatrix) -> list[GgmlTiles]:
    """Pack a matrix on its device, neighbouring parts that are stored alike together.

    Raises ValueError naming the part for a weight that is not a number.
    """
    joined: list[list[ReadRows]] = []
    for rows in matrix.parts:
        part = ReadRows(rows, *sound_integers(rows), rows.order())
        if joined and joined[-1][0].joins(part):
            joined[-1].append(part)
        else:
            joined.append([part])
    return [_pack(parts, matrix.device) for parts in joined]


def _pack(parts: list[ReadRows], device: torch.device) -> GgmlTiles:
    first, storage = parts[0], parts[0].storage
    values, scales = (
        torch.cat(each) for each in zip(*((part.values, part.rows.scales) for part in parts), strict=True)
    )
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    inputs, order = first.rows.inputs, None if first.order is None else first.order.to(device)
    tiles = empty_tiles(first.rows.ggml_format, len(values), inputs, device, storage)
    panels = max(1, CHUNK // inputs // PANEL)
    for start in range(0, tiles.words.shape[0], panels):
        rows = slice(start * PANEL, (start + panels) * PANEL)
        q = _stored(values[rows].to(device), storage)
        words = _scale_words(scales[rows].to(device), None if zeros is None else zeros[rows].to(device), tiles)
        missing = (0, 0, 0, -len(q) % PANEL)
        place = slice(start, start + -(-len(q) // PANEL))
        store_integers(tiles, place, F.pad(q if order is None else q[:, order], missing))
        store_scales(tiles, place, F.pad(words, (0, 0, *missing)))
    return replace(tiles, order=order)


def _stored(values: Tensor, storage: Storage) -> Tensor:
    """Return the numbers as uint8: integers from 0 on, the bits of floats."""
    if storage.floats:
        return values.view(torch.uint8)
    return (values + 8).view(torch.uint8) if storage.bits == 4 else values.view(torch.uint8) ^ 128


def _scale_words(scales: Tensor, zeros: Tensor | None, tiles: GgmlTiles) -> Tensor:
    """Return scales and zero points `[R, G]` as words `[R, units, words of an output]` int32."""
    number = torch.int32 if scales.dtype == torch.float32 else torch.int16
    fields = [scales.contiguous().view(number), *([] if zeros is None else [zeros.to(number)])]
    storage, units = tiles.storage, tiles.scales.shape[1]
    filled = [F.pad(each, (0, units * storage.groups - each.shape[1])) for each in fields]
    words = torch.stack(filled, -1).view(len(scales), units, -1)  # a group's scale, then its zero point
    if number == torch.int16:
        words = F.pad(words, (0, words.shape[2] % 2)).view(torch.int32)
    return words
