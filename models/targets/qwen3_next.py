"""Qwen3-Next (Qwen3NextForCausalLM): Qwen3.5-MoE whose checkpoints hold projections of gated delta nets by key head.

Of each key head the rows of its query and key, of the values and of the gates z of its value heads follow each other in
one tensor, and those of b and a in another. They are put into the order of Qwen3.5 as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import RecurrentConfig
from models.targets.qwen3_5 import Qwen35MoeTarget

STORED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
Range = tuple[int, int]  # of rows, the last + 1


class Qwen3NextTarget(Qwen35MoeTarget):
    def stored_rows(self, name: str) -> dict[str, tuple[Range, ...]]:
        sizes, kind = self.config.recurrent, name.rpartition(".")[0].rpartition(".")[2]
        assert sizes is not None
        return {name.replace(kind, part): rows for part, rows in ranges(sizes, kind).items()}

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes, kept = self.config.recurrent, dict(tensors)
        assert sizes is not None
        for stored, parts in STORED.items():
            order = torch.cat([torch.arange(*rows) for part in ranges(sizes, stored).values() for rows in part])
            for name in [name for name in kept if parts[0] in name]:
                values = [kept.pop(name.replace(parts[0], part)) for part in parts]
                kept[name.replace(parts[0], stored)] = torch.cat(values)[order.argsort()]
        return kept


def ranges(sizes: RecurrentConfig, stored: str) -> dict[str, tuple[Range, ...]]:
    """Return the rows of a stored tensor that each of its parts consists of, in order; of another tensor none."""
    key, group = sizes.key_size, sizes.heads // sizes.groups
    value = group * sizes.value_size
    inner = {  # of a key head: where it begins in the tensor, and the ends of its query, key, values, gates
        "in_proj_qkvz": ((key, key, value), (value,)),
        "in_proj_ba": ((group,), (group,)),
    }.get(stored, ())
    stride, first, found = sum(map(sum, inner)), 0, dict[str, tuple[Range, ...]]()
    for part, runs in zip(STORED.get(stored, ()), inner, strict=True):
        rows = list[Range]()
        for run in runs:
            rows += [(first + head * stride, first + head * stride + run) for head in range(sizes.groups)]
            first += run
        found[part] = tuple(rows)
    return found
