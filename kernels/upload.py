"""Copies what the host decided to a device, without waiting for it.

On a GPU the copy is in stream order, from pinned memory, which torch does not use again before it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`."""
    if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of `values` on `device`. One call for several lists costs one copy."""
    return sent(torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda"), device)


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return lists of any lengths as int64 tensors on `device`, by one copy. Each begins at a multiple of 16 bytes."""
    padded = [[*values, *[0] * (len(values) % 2)] for values in lists]
    parts = upload([value for values in padded for value in values], device).split(list(map(len, padded)))
    return [part[: len(values)] for part, values in zip(parts, lists, strict=True)]


def upload_columns(
    integers: Sequence[Sequence[int]], fractions: Sequence[Sequence[float]], device: torch.device
) -> list[Tensor]:
    """Return columns of one length as int64 and fp32 tensors on `device`, by one copy.

    Each begins at a multiple of 16 bytes: Triton compiles kernels for such addresses.
    """
    count, size = len(integers), len(integers[0])
    padded = size + -size % 4
    words = torch.zeros((2 * count + len(fractions)) * padded, dtype=torch.int32, pin_memory=device.type == "cuda")

    def columns(words: Tensor) -> tuple[Tensor, Tensor]:
        wide, narrow = words.tensor_split([2 * count * padded])
        return wide.view(torch.int64).view(-1, padded)[:, :size], narrow.view(torch.float32).view(-1, padded)[:, :size]

    for column, values in zip(columns(words), (integers, fractions), strict=True):
        column.copy_(torch.tensor(values).view(column.shape))
    return [column for part in columns(sent(words, device)) for column in part]
