"""Losses over the vocabulary in C (vocabulary.c): rows stay in cache, and no probabilities are written to memory."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.declarations import fields
from kernels.cpu.library import KINDS, LANES, address, library


class LossArguments(ctypes.Structure):
    """vocabulary_loss_args of vocabulary.c."""

    __slots__ = ()
    _fields_ = fields("vocabulary_loss_args")


class TeachArguments(ctypes.Structure):
    """vocabulary_teach_args of vocabulary.c."""

    __slots__ = ()
    _fields_ = fields("vocabulary_teach_args")


class Statistics(NamedTuple):
    """Statistics of rows of logits z, `[R]` each."""

    most: Tensor  # the largest
    sum: Tensor  # Σ exp(z - most)
    dot: Tensor  # Σ exp(z - most) (z - most)
    best: Tensor  # int64, the first column of the largest


def _threads(rows: int) -> int:
    return max(1, min(rows, torch.get_num_threads()))


def loss_rows(
    logits: Tensor,
    taught: Tensor | None,
    teacher: Tensor | None,
    log_z: Tensor | None,
    mass: Tensor | None,
    label: Tensor | None,
    factor: Tensor | None,
    *,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Call vocabulary_loss: return largest, sum, dot, overlap and best of logits `[N, V]`.

    With `factor` `[N]` the logits are overwritten with their gradient. All tensors are contiguous.
    """
    native, (rows, size) = library(), logits.shape
    assert native is not None
    assert logits.is_contiguous()
    assert taught is None or (taught.is_contiguous() and taught.shape[1] == size)
    threads = _threads(rows)
    scratch = torch.empty(threads, 2, -(-size // LANES) * LANES)
    most, total, dot = torch.empty(3, rows)
    overlaps = torch.empty(rows) if overlap else None
    best = torch.empty(rows, dtype=torch.int64)
    tensors = {
        "logits": logits, "taught": taught, "teacher": teacher, "label": label, "factor": factor, "log_z": log_z,
        "mass": mass, "most": most, "sum": total, "dot": dot, "overlap": overlaps, "best": best, "scratch": scratch,
    }  # fmt: skip
    native.vocabulary_loss(
        ctypes.byref(
            LossArguments(
                **{name: address(value) for name, value in tensors.items()},
                rows=rows,
                size=size,
                kind=KINDS[logits.dtype],
                taught_kind=KINDS[logits.dtype if taught is None else taught.dtype],
                threads=threads,
            )
        )
    )
    return most, total, dot, overlaps, best


def teach_rows(logits: Tensor, ids: Tensor | None) -> tuple[Statistics, Statistics, Tensor]:
    """Return statistics of logits `[R, V]` and of their columns `ids` `[Vd]` (None: all), and the columns `[R, Vd]`."""
    native, (rows, size) = library(), logits.shape
    assert native is not None
    logits = logits.contiguous()
    drafts = size if ids is None else len(ids)
    drafted = logits if ids is None else logits.new_empty(rows, drafts)
    ids = None if ids is None else ids.contiguous()
    values, best = torch.empty(3, 2, rows), torch.empty(2, rows, dtype=torch.int64)
    native.vocabulary_teach(
        ctypes.byref(
            TeachArguments(
                logits=logits.data_ptr(),
                ids=address(ids),
                drafted=drafted.data_ptr(),
                **{name: value.data_ptr() for name, value in zip(("most", "sum", "dot"), values, strict=True)},
                best=best.data_ptr(),
                rows=rows,
                size=size,
                drafts=drafts,
                kind=KINDS[logits.dtype],
                threads=_threads(rows),
            )
        )
    )
    most, total, dot = values
    full, part = (Statistics(most[index], total[index], dot[index], best[index]) for index in (0, 1))
    return full, full if ids is None else part, drafted
