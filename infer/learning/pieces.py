"""What a recorder took of a request, step by step, until it is put together as one sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.learning.recording import Span

Tensors = dict[str, Tensor]  # of consecutive positions, by name
STATES = "features"  # the tensors without which a position counts as missing


class Piece(NamedTuple):
    first: int  # position
    tensors: Tensors


class Turn(NamedTuple):
    tokens: Sequence[int]
    pieces: Sequence[Piece]


class Pieces:
    """Those of unfinished requests, by request id."""

    def __init__(self) -> None:
        self._held = defaultdict[str, list[Piece]](list)

    def add(self, spans: Sequence[Span], tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors `[rows, ...]`, whose rows are those of the spans, one span after another."""
        place = 0
        for request, first, rows in spans:
            piece = {name: value[place : place + len(rows)] for name, value in tensors.items()}
            self._held[request.request_id].append(Piece(first, piece))
            place += len(rows)

    def pop(self, request_id: str) -> list[Piece]:
        return self._held.pop(request_id, [])


def joined(turns: Iterable[Turn], ids: Sequence[int]) -> tuple[Tensors, int]:
    """Return what the turns of a conversation hold of a sequence, and from which position on they hold all of it.

    A turn's positions count as far as its tokens are the sequence's. Nothing needs what follows from the last token,
    so the last position may be missing: it is 0 then, as is a tensor where no piece has it.
    """
    out, covered = Tensors(), torch.zeros(len(ids), dtype=torch.bool)
    for tokens, pieces in turns:
        pairs = zip(tokens, ids, strict=False)
        common = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(ids)))
        for first, tensors in pieces:
            for name, value in tensors.items():
                whole = out.setdefault(name, value.new_zeros(len(ids), *value.shape[1:]))
                value = value[: max(0, common - first)]
                whole[first : first + len(value)] = value
                if name == STATES:
                    covered[first : first + len(value)] = True
    missing = (~covered[:-1]).nonzero()
    return out, int(missing[-1]) + 1 if len(missing) else 0
