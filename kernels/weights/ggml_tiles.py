"""Matrices in blocks (ggml.py) as Triton kernels read them: the bits of the file in another order. Those in
groups (groups.py) are packed into the same tiles by group_tiles.py.

Outputs are in panels of 64, and a panel's weights in tiles of 128 along K (larger ones would take too many registers).
An output has W words of 32 bits in a tile, 16 of them or 32 for Q8_0. Word j holds the 4 low bits of the weights j,
W + j, 2 W + j, ..., or 8 bits. So the same bits of every word are W neighbouring weights of all outputs, one operand of
a product, and a tile is read in whole cache lines. The further bits of a weight of 5 or 6 bits are in words of 8 or 16
bits, in the same order. Scales are words too, a few for each output of a tile:

    half          two fp16 scales, of neighbouring groups                              (Q4_0, Q5_0, Q8_0)
    half_offset   an fp16 scale and an fp16 offset, of each group                      (Q4_1, Q5_1)
    super_offset  fp16 factors of scales and of offsets; the 4 low bits of 8 scales; the 4 low bits of 8 offsets; the
                  2 high bits of the scales, then of the offsets                       (Q4_K, Q5_K)
    super_scale   the factor in fp32; 4 scales of 8 bits; 4 more                       (Q6_K)
    bfloat        two bf16 scales, of neighbouring groups                              (groups)
    float         an fp32 scale, of each group                                         (groups)
    half_zero     an fp16 scale and a zero point of 16 bits, of each group             (groups)
    bfloat_zero   the same with a bf16 scale                                           (groups)
    float_zero    an fp32 scale, and a zero point, of each group                       (groups)

Tiles that K does not fill are filled with weights and scales of zero, which kernels do not read as part of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.weights.ggml import BLOCK, GGML_BLOCK_BYTES, GgmlMatrix, GgmlRows, damage

PANEL, WIDTH = 64, 128  # outputs and inputs of a tile
SUPER = 256  # weights of a block of the formats with K in their name
CHUNK = 2**24  # weights packed at a time, which takes some 200 MB


class Storage(NamedTuple):
    """How the weights of a format are stored."""

    bits: int  # of a weight in a word, 4 or 8
    upper: int  # further bits
    signed: bool  # the integer is what is stored less half of the range
    group: int  # weights that share a scale
    scales: str
    floats: bool = False  # the 8 bits of a weight are a float8_e4m3fn

    @property
    def offset(self) -> bool:
        return self.scales.endswith("_offset")

    @property
    def zero(self) -> bool:
        return self.scales.endswith("_zero")

    @property
    def sharing(self) -> int:
        """The number of tiles whose scales are stored together."""
        return -(-(SUPER if self.scales == "super_offset" else max(self.group, WIDTH)) // WIDTH)

    @property
    def groups(self) -> int:
        """The number of groups in a tile; a larger group is one in each of its tiles."""
        return max(1, WIDTH // self.group)

    @property
    def words(self) -> int:
        """The number of words that an output's scales have, in tiles that store them together."""
        if self.scales in ("half", "bfloat"):  # two groups share a word
            return -(-self.groups // 2)
        others = {"super_offset": 4, "super_scale": 3, "float_zero": 2 * self.groups}
        return others.get(self.scales, self.groups)


STORAGE = {
    "Q4_0": Storage(4, 0, True, 32, "half"),
    "Q4_1": Storage(4, 0, False, 32, "half_offset"),
    "Q5_0": Storage(4, 1, True, 32, "half"),
    "Q5_1": Storage(4, 1, False, 32, "half_offset"),
    "Q8_0": Storage(8, 0, True, 32, "half"),
    "Q4_K": Storage(4, 0, False, 32, "super_offset"),
    "Q5_K": Storage(4, 1, False, 32, "super_offset"),
    "Q6_K": Storage(4, 2, True, 16, "super_scale"),
}


@dataclass(frozen=True)
class GgmlTiles:
    """A matrix `[outputs, inputs]` of one format: P panels of T tiles.

    `order` int64 `[inputs]`: the inputs in the order in which the tiles have them; None: as they are.
    """

    ggml_format: str
    storage: Storage
    outputs: int
    inputs: int
    words: Tensor  # int32 [P, T, 64, W]
    upper: Tensor | None  # int8 or int16 [P, T, 64, W]
    scales: Tensor  # int32 [P, T / tiles that share them, words of an output, 64]
    order: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for each in (self.words, self.upper, self.scales, self.order) if each is not None)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


def empty_tiles(
    ggml_format: str, outputs: int, inputs: int, device: torch.device, storage: Storage | None = None
) -> GgmlTiles:
    """Return tiles without values; `storage`: of a format that is none of GGUF files."""
    storage = storage or STORAGE[ggml_format]
    panels, tiles = -(-outputs // PANEL), -(-inputs // WIDTH)
    units = -(-tiles // storage.sharing)
    shape = (panels, tiles, PANEL, WIDTH * storage.bits // 32)
    upper = None
    if storage.upper:
        upper = torch.empty(shape, dtype=torch.int8 if storage.upper == 1 else torch.int16, device=device)
    words = torch.empty(shape, dtype=torch.int32, device=device)
    scales = torch.empty(panels, units, storage.words, PANEL, dtype=torch.int32, device=device)
    return GgmlTiles(ggml_format, storage, outputs, inputs, words, upper, scales)


def pack_tiles(matrix: GgmlMatrix) -> list[GgmlTiles]:
    """Pack a matrix on its device, neighbouring parts of one format together.

    Raises ValueError naming part and file offset for a block whose scale is not finite.
    """
    return [_pack(list(parts), matrix.device) for _, parts in groupby(matrix.parts, key=lambda part: part.ggml_format)]


def _pack(parts: Sequence[GgmlRows], device: torch.device) -> GgmlTiles:
    name, inputs = parts[0].ggml_format, parts[0].inputs
    tiles = empty_tiles(name, sum(part.count for part in parts), inputs, device)
    storage = tiles.storage
    panels = max(1, CHUNK // inputs // PANEL)
    for index, raw in enumerate(_chunks(parts, panels * PANEL)):
        blocks = raw.to(device).unflatten(1, (-1, GGML_BLOCK_BYTES[name]))  # [R, blocks, bytes]
        if (broken := _broken(blocks, name)) is not None:
            raise _error(parts, index * panels * PANEL + broken[0], broken[1])
        blocks = F.pad(blocks, (0, 0, 0, 0, 0, -len(blocks) % PANEL))
        place = slice(index * panels, index * panels + len(blocks) // PANEL)
        store_integers(tiles, place, _integers(blocks, name).flatten(1))
        store_scales(tiles, place, _scales(blocks, storage.scales, tiles.scales.shape[1], storage.groups))
    return tiles


def store_integers(tiles: GgmlTiles, place: slice, q: Tensor) -> None:
    """Store the integers `[panels * 64, inputs]` uint8 of the panels at `place`."""
    bits, columns = tiles.storage.bits, tiles.words.shape[-1]
    q = F.pad(q, (0, tiles.words.shape[1] * WIDTH - tiles.inputs))
    q = q.view(-1, PANEL, tiles.words.shape[1], 32 // bits, columns)
    tiles.words[place] = _joined(q & (2**bits - 1), bits).transpose(1, 2)
    if tiles.upper is not None:
        tiles.upper[place] = _joined(q >> bits, tiles.storage.upper).transpose(1, 2).to(tiles.upper.dtype)


def store_scales(tiles: GgmlTiles, place: slice, words: Tensor) -> None:
    """Store the words `[panels * 64, units, words of an output]` int32 of the panels' scales."""
    tiles.scales[place] = words.unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1)


def _chunks(parts: Sequence[GgmlRows], size: int) -> Iterator[Tensor]:
    """Yield the rows of the parts as they are stored, `size` at a time."""
    kept: list[Tensor] = []
    for part in parts:
        first = 0
        while first < part.count:
            last = min(part.count, first + size - sum(map(len, kept)))
            kept.append(part.data[first:last] if part.order is None else part.data[part.order[first:last]])
            first = last
            if sum(map(len, kept)) == size:
                yield torch.cat(kept)
                kept = []
    if kept:
        yield torch.cat(kept)


def _halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """Return `count` fp16 numbers of every block from byte `first` on, `[R, blocks, count]`."""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16)


def _factors(blocks: Tensor, name: str) -> Tensor:
    if name == "Q6_K":
        return _halves(blocks, 208, 1)
    return _halves(blocks, 0, 2 if STORAGE[name].offset else 1)


def _broken(blocks: Tensor, name: str) -> tuple[int, int] | None:
    """Return row and number of a block whose scale or offset is not finite."""
    broken = ~_factors(blocks, name).isfinite().all(-1)
    if not broken.any():
        return None
    row, block = broken.nonzero()[0].tolist()
    return row, block


def _error(parts: Sequence[GgmlRows], row: int, block: int) -> ValueError:
    for part in parts:
        if row < part.count:
            row = row if part.order is None else int(part.order[row])
            return damage(part, row * (part.inputs // BLOCK[part.ggml_format]) + block)
        row -= part.count
    raise AssertionError("no part has this row")


def _integers(blocks: Tensor, name: str) -> Tensor:
    """Return the integers `[R, blocks, weights]` uint8 of blocks `[R, blocks, bytes]`, as `Storage` has them.

    Low nibbles of a block of 32 are weights 0 to 15, high ones 16 to 31; a block of 256 has such halves per 64 weights,
    Q6_K per 128. Its fifth bits are in order (Q5_0, Q5_1), or bit i of byte j is that of weight 32 i + j (Q5_K).
    """
    if name == "Q8_0":
        return blocks[..., 2:] ^ 128
    first, span = {
        "Q4_0": (2, 16), "Q4_1": (4, 16), "Q5_0": (6, 16), "Q5_1": (8, 16),
        "Q4_K": (16, 32), "Q5_K": (48, 32), "Q6_K": (0, 64),
    }[name]  # fmt: skip
    low = blocks[..., first : first + BLOCK[name] // 2].unflatten(-1, (-1, span))
    q = torch.stack([low & 15, low >> 4], -2).flatten(-3)
    shift = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    if name in ("Q5_0", "Q5_1"):
        return q | (blocks[..., first - 4 : first, None] >> shift & 1).flatten(-2) << 4
    if name == "Q5_K":
        return q | (blocks[..., None, 16:48] >> shift[:, None] & 1).flatten(-2) << 4
    if name == "Q6_K":
        pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
        return q | (pairs >> 2 * shift[:4, None] & 3).flatten(-3) << 4
    return q


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers `[R, blocks, 8]` of scales and offsets, 6 bits each in 12 bytes (get_scale_min_k4)."""
    first, second, third = blocks[..., 4:16].int().split(4, -1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)


def _joined(values: Tensor, bits: int) -> Tensor:
    """Join `[..., n, W]` of `bits` bits each to int32 `[..., W]`, the first in the lowest bits."""
    out = torch.zeros(*values.shape[:-2], values.shape[-1], dtype=torch.int32, device=values.device)
    for index in range(values.shape[-2]):
        out |= values[..., index, :].int() << (bits * index)
    return out


def _scales(blocks: Tensor, kind: str, tiles: int, groups: int) -> Tensor:
    """Return the words `[R, tiles, words of an output]` int32 of the scales; `groups`: of a tile."""
    if kind == "super_scale":
        factor = _halves(blocks, 208, 1).float().view(torch.int32)
        scales = blocks[..., 192:208].contiguous().view(torch.int32)  # [R, blocks, 4]
        return torch.cat([factor, scales[..., :2], factor, scales[..., 2:]], -1).view(len(blocks), tiles, 3)
    if kind == "super_offset":
        scales, offsets = _six_bits(blocks)
        low = [_joined((each & 15)[..., None], 4) for each in (scales, offsets)]
        high = _joined((torch.cat([scales, offsets], -1) >> 4)[..., None], 2)
        return torch.cat([blocks[..., :4].contiguous().view(torch.int32), *low, high], -1)
    halves = blocks[..., : 4 if kind == "half_offset" else 2].contiguous().view(torch.int16).flatten(1)
    filled = F.pad(halves, (0, tiles * groups * (2 if kind == "half_offset" else 1) - halves.shape[1]))
    return filled.contiguous().view(torch.int32).view(len(blocks), tiles, -1)
