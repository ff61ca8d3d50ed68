"""A checkpoint that a test writes: its config.json, and its tensors with the names that they have in our export."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, VD = 384, 64, 96  # tokens, hidden size, draft vocabulary
Row = tuple[str, str, tuple[int, ...]]  # their name, our name, shape


@dataclass(frozen=True)
class Source:
    form: str
    head: str
    config: dict[str, Any]
    rows: list[Row]
    file: str = "model.safetensors"
    options: list[str] = field(default_factory=list)  # required where the format leaves something open
    copies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the target's tensors, which are left out

    @property
    def chosen(self) -> dict[str, str]:
        """Return `options` as fields of `ConversionOptions`."""
        names = [option.removeprefix("--").replace("-", "_") for option in self.options[::2]]
        return dict(zip(names, self.options[1::2], strict=True))

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        return fill([*self.rows, *((name, name, shape) for name, shape in self.copies.items())], seed)

    def write(self, folder: Path, *, seed: int = 0) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        write = save_file if self.file.endswith(".safetensors") else torch.save
        write(self.tensors(seed), folder / self.file)
        return folder


def fill(rows: list[Row], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights, with draft vocabulary maps that agree with each other."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(V, generator=generator)[:VD].sort().values
    marks = torch.zeros(V, dtype=torch.bool)
    marks[used] = True
    maps = {"d2t": used - torch.arange(VD), "t2d": marks, "token_map": used}
    tensors = {}
    for name, _, shape in rows:
        if name in maps:
            tensors[name] = maps[name]
        elif name.endswith(".weight") and len(shape) == 1:  # of a norm
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = 0.2 * torch.randn(shape, generator=generator)
        assert tuple(tensors[name].shape) == shape
    return tensors
