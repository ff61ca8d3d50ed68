"""Tensors that a checkpoint stores merged, where a target's layout or a tensor parallel rank needs parts of them.

Newer versions of transformers may write all experts of a layer as one tensor, `[E, 2 I, H]` for gate and up and
`[E, H, I]`; of a merged projection (Phi's) a rank needs its own rows of each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weights.ggml import GgmlRows
from kernels.weights.groups import GroupedRows
from models.mixers.sharding import own_rows
from models.quantized.tensors import QuantizedTensors
from models.sharding import Part
from models.targets.llama import LlamaTarget
from models.weights import MERGED, LazyTensors, NamedTensors, merged_parts, rows_of_parts

STACKED = re.compile(r"(.*\.experts|.*\.block_sparse_moe)\.(gate_up_proj|up_proj|down_proj|(in|out)put_linear\.weight)")
SLICED = (LazyTensors, QuantizedTensors)  # of files whose stacks of experts are read one by one
GRANITE = {"input_linear.weight": "gate_up_proj", "output_linear.weight": "down_proj"}


class View(NamedTuple):
    """Ranges of rows, concatenated, of a stored tensor, or of one expert in it; without ranges all of the tensor."""

    stored: str
    rows: tuple[tuple[int, int], ...] = ()
    expert: int | None = None


class Views(NamedTensors):
    """Tensors by view, each read on access."""

    def __init__(self, tensors: NamedTensors, views: Mapping[str, View]) -> None:
        self._tensors, self._sources = tensors, views

    def __getitem__(self, name: str) -> Tensor:
        stored, rows, expert = self._sources[name]
        if expert is None:
            value = self._tensors[stored]
            return torch.cat([value[first:end] for first, end in rows]) if rows else value
        assert isinstance(self._tensors, SLICED)
        piece = self._tensors.slice(stored)
        return torch.cat([piece[expert : expert + 1, first:end][0] for first, end in rows])

    def shape(self, name: str) -> Sequence[int]:
        stored, rows, expert = self._sources[name]
        whole = self._tensors.shape(stored)[0 if expert is None else 1 :]
        return [sum(end - first for first, end in rows), *whole[1:]] if rows else whole

    def blocks(self, name: str) -> GgmlRows | None:
        stored, ranges, expert = self._sources[name]
        rows = self._tensors.blocks(stored) if expert is None else None
        if rows is None or not ranges:
            return rows
        index = torch.cat([torch.arange(*each) for each in ranges])
        return replace(rows, order=index if rows.order is None else rows.order[index])

    def groups(self, name: str) -> GroupedRows | None:
        stored, ranges, expert = self._sources[name]
        rows = self._tensors.groups(stored) if expert is None else None
        return rows and (rows.of(torch.cat([torch.arange(*each) for each in ranges])) if ranges else rows)

    def release(self) -> None:
        self._tensors.release()

    def stored(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors with other values of some of the views, each tensor whole."""
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            stored, ranges, expert = self._sources[name]
            if not ranges:
                tensors[stored] = value
                continue
            if stored not in tensors:
                tensors[stored] = self._tensors[stored].clone()
            whole = tensors[stored] if expert is None else tensors[stored][expert]
            for (first, end), rows in zip(ranges, value.split([end - first for first, end in ranges]), strict=True):
                whole[first:end] = rows
        return tensors


def viewed(tensors: NamedTensors, target: LlamaTarget, part: Part | None) -> NamedTensors:
    """Return a checkpoint's tensors under the names of `target`'s layout, and of merged ones the rows of `part`."""
    views: dict[str, View] = {}
    for name in tensors:
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if stacked := stacked_views(tensors, name, target.published_name, part):
            views |= stacked
        elif rows := target.stored_rows(name):
            views |= {each: View(name, ranges) for each, ranges in rows.items()}
        elif kind == "input_linear":  # Granite's gate and up
            names, size = merged_parts(name.replace(kind, "gate_up_proj")), tensors.shape(name)[0] // 2
            views |= {each: View(name, (_rows(each, n * size, size, part),)) for n, each in enumerate(names)}
        elif part is not None and kind in (*MERGED, "c_attn"):  # the last is GPT-BigCode's qkv_proj
            names, total = merged_parts(name.replace("c_attn", "qkv_proj")), tensors.shape(name)[0]
            sizes = rows_of_parts(total, len(names), (target.config.num_heads, target.config.num_kv_heads))
            views[name] = View(name, tuple(map(_rows, names, accumulate(sizes, initial=0), sizes, [part] * len(sizes))))
        else:
            views[target.published_name(name)] = View(name)
    tensors = tensors if all(View(name) == view for name, view in views.items()) else Views(tensors, views)
    if part is None or target.recurrent is None:
        return tensors
    rows = own_rows(target, target.checkpoint_layout(), part)
    return Views(tensors, {name: View(name, rows.get(name, ())) for name in tensors})


def stacked_views(
    tensors: NamedTensors, stored: str, published_name: Callable[[str], str], part: Part | None = None
) -> dict[str, View]:
    """Return the matrices of all experts that are stored in one tensor, by their own names; of another tensor none."""
    match = STACKED.fullmatch(stored)
    if match is None or not isinstance(tensors, SLICED) or len(shape := tensors.shape(stored)) != 3:
        return {}
    views, kind = dict[str, View](), GRANITE.get(match[2], match[2])
    experts = match[1] if match[1].endswith(".experts") else f"{match[1]}.experts"
    for expert in range(shape[0]):
        names = [*map(published_name, merged_parts(f"{experts}.{expert}.{kind}.weight"))]
        size = shape[1] // len(names)
        for place, name in enumerate(names):
            views[name] = View(stored, (_rows(name, place * size, size, part),), expert)
    return views


def _rows(name: str, first: int, size: int, part: Part | None) -> tuple[int, int]:
    """Return this rank's rows of the `size` rows of tensor `name`, which begin at row `first`."""
    begin, end = (part and part.rows(name, size)) or (0, size)
    return first + begin, first + end
