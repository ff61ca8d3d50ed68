"""gpt-oss's experts under the names of separate ones: its checkpoints stack those of a layer.

`experts.gate_up_proj` `[E, H, 2 I]`, whose columns alternate between gate and up, `down_proj` `[E, I, H]`, and biases
`gate_up_proj_bias` `[E, 2 I]`, `down_proj_bias` `[E, H]`. In MXFP4 `_blocks` `[E, N, K / 32, 16]` and `_scales`
`[E, N, K / 32]` are there in place of a weight (models/quantized/mxfp4_layout.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.weights import LazyTensors, Rows, merged_parts, shard_files

STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
SEPARATE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|down)_proj\.(weight|bias)")
MARK = ".experts.gate_up_proj_bias"  # of no other family


class SeparateExperts(LazyTensors):
    def __init__(self, files: Sequence[Path], rows: Rows | None = None) -> None:
        super().__init__(files, rows)
        self._experts: dict[str, tuple[str, int, slice]] = {}  # name -> stored tensor, expert, its rows
        for stored in [name for name in self if STACKED.fullmatch(name)]:
            match, file, count = STACKED.fullmatch(stored), self._sources[stored], super().shape(stored)[0]
            assert match is not None
            kind = match[3].removeprefix("_") or "weight"
            for expert in range(count):
                names = merged_parts(f"{match[1]}.{expert}.{match[2]}.{kind}")
                self._sources |= dict.fromkeys(names, file)
                self._experts |= {
                    name: (stored, expert, slice(place, None, len(names))) for place, name in enumerate(names)
                }
            del self._sources[stored]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._experts:
            return super().__getitem__(name)
        stored, expert, rows = self._experts[name]
        value = self._shards[self._sources[name]].get_tensor(stored)[expert]  # maps it, reads nothing
        value = (value.t() if name.endswith(".weight") else value)[rows]
        row_range = None if self._rows is None else self._rows(name, len(value))
        return value if row_range is None else value[slice(*row_range)]

    def shape(self, name: str) -> Sequence[int]:
        return self[name].shape if name in self._experts else super().shape(name)


def open_weights(folder: Path, rows: Rows | None = None) -> LazyTensors:
    """Return the tensors of a checkpoint folder; experts that are stacked as gpt-oss's under names of separate ones."""
    files = shard_files(folder)
    tensors = LazyTensors(files, rows)
    return SeparateExperts(files, rows) if any(name.endswith(MARK) for name in tensors) else tensors


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with gpt-oss's experts stacked, the inverse of reading them."""
    stacked, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, value in tensors.items():
        match = SEPARATE.fullmatch(name)
        if match is None and ".experts." not in name:
            stacked[name] = value
        elif match is not None:
            gate, bias = match[3] == "gate", match[4] == "bias"
            if gate:
                value = torch.stack([value, tensors[name.replace(".gate_proj.", ".up_proj.")]], dim=1).flatten(0, 1)
            stored = f"{match[1]}.{'gate_up' if gate else 'down'}_proj{'_bias' if bias else ''}"
            experts.setdefault(stored, []).append(value if bias else value.t())
    return stacked | {name: torch.stack(values) for name, values in experts.items()}
