"""Tensor parallelism of recurrent layers: a rank has some groups of heads, or LFM2's channels, and keeps their states.

Where there are fewer groups than ranks, each rank has one, and a part of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from kernels.elementwise import LANES
from models.config import RecurrentConfig
from models.layers import Linear
from models.sharding import Part

Range = tuple[int, int]  # of rows, first and last + 1
Units = tuple[tuple[int, int], ...]  # so many heads, groups or channels, of so many rows each, one behind another


class Mixer(nn.Module):
    """Base of all. `config`: the sizes of this rank. `rows`: units of the parameters, or of all of a module, that ranks
    divide.
    """

    config: Any
    o_proj: Linear
    rows: dict[str, Units]

    def parts(self) -> dict[str, Any] | None:
        """Return what models.decoder.parts_of reads of a mixer; None where no kernel runs such a layer."""
        return None


def units_of(config: RecurrentConfig) -> Units:
    """Return the units of keys, of values and of one number per head."""
    return (config.groups, config.key_size), (config.heads, config.value_size), (config.heads, 1)


def unit_rows(units: Units, rank: int, ranks: int) -> tuple[Range, ...]:
    """Return the ranges of rows that a rank holds of a tensor of such units."""
    starts = list(accumulate((count * size for count, size in units), initial=0))
    firsts = [start + rank * count // ranks * size for start, (count, size) in zip(starts[:-1], units, strict=True)]
    return tuple((first, first + max(n // ranks, 1) * size) for first, (n, size) in zip(firsts, units, strict=True))


def part_of(config: RecurrentConfig, ranks: int) -> RecurrentConfig:
    """Return what each of so many ranks computes and keeps. Raises ValueError where that cannot be divided.

    Rows are whole vectors, for kernels in C, where those of one process are.
    """
    for count in range(ranks, 0, -1):
        heads, groups = config.heads // count, max(config.groups // count, min(config.groups, 1))
        channels = heads * config.value_size + 2 * groups * config.key_size if heads else config.channels // count
        widths = (config.channels, channels), (config.heads * config.value_size, heads * config.value_size)
        uneven = (config.heads or config.channels) % count or (config.groups % count and count % config.groups)
        if not uneven and all((whole % LANES == 0) == (width % LANES == 0) for whole, width in widths):
            break
    if count == ranks:
        return replace(config, channels=channels, heads=heads, groups=groups)
    what = f"{config.heads} heads in {config.groups} groups" if config.heads else f"{config.channels} channels"
    raise ValueError(
        f"engine.tensor_parallel={ranks}: a recurrence of {what} cannot be shared evenly by so many ranks in whole "
        f"vectors of {LANES}; use {count}"
    )


def own_rows(target: nn.Module, layout: Mapping[str, tuple[str, ...]], part: Part) -> dict[str, tuple[Range, ...]]:
    """Return the ranges of rows of checkpoint tensors, by name, that a rank holds of a divided target's mixers."""
    rows = dict[str, tuple[Range, ...]]()
    for path, mixer in ((path, module) for path, module in target.named_modules() if isinstance(module, Mixer)):
        for name, _ in mixer.named_parameters():
            units, names = mixer.rows.get(name.partition(".")[0], ()), layout[f"{path}.{name}"]
            rows |= dict.fromkeys(names, unit_rows(units[: len(units) // len(names)], part.rank, part.ranks))
    return rows
