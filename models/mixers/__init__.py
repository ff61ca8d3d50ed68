"""What mixes the rows of a recurrent layer, in attention's place or beside it (models/recurrence.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from models.layers import Linear


class Mixer(nn.Module):
    """Base of all. `config`: the sizes, with tensor parallelism those of this rank.

    `rows`: of a parameter, or of those of a module, which heads, groups or channels are one behind another, as
    models.sharding.unit_rows divides them. Each rank holds the rest of the parameters.
    """

    config: Any
    o_proj: Linear
    rows: dict[str, tuple[tuple[int, int], ...]]

    def parts(self) -> dict[str, Any] | None:
        """Return what models.decoder.parts_of reads of a mixer; None where no kernel runs such a layer."""
        return None
