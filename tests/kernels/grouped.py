"""Random matrices in groups, as GPTQ, AWQ and compressed-tensors describe them."""

from __future__ import annotations

import torch

from kernels.weights.groups import GroupedRows
from kernels.weights.quantize import NarrowFormat


def make_groups(
    rows: int,
    columns: int,
    weight_format: NarrowFormat,
    group: int,
    scales_dtype: torch.dtype,
    zeros: bool,
    ordered: bool,
    *,
    seed: int = 0,
) -> GroupedRows:
    """Return a matrix with the format's extreme numbers among its own; `ordered`: columns in a random order."""
    generator = torch.Generator().manual_seed(seed)
    half = 8 if weight_format == "int4" else 128
    values = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
    values[0, :2] = torch.tensor([-half, half - 1])
    if weight_format == "fp8":
        values = (values / 2.0).to(torch.float8_e4m3fn)
    count = columns // group
    scales = (torch.rand(rows, count, generator=generator) + 0.1) / half / columns**0.5
    zero = torch.randint(-half, half, (rows, count), generator=generator, dtype=torch.int8) if zeros else None
    groups = torch.randperm(columns, generator=generator) // group if ordered else None
    return GroupedRows(weight_format, columns, scales.to(scales_dtype), groups, lambda: (values, zero))
