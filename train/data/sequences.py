"""Token sequences with the mask of what the target itself wrote, how they share a row, and in which order they come.

Ids and masks are stored as they were generated and never rendered again. Knows nothing about prompts' origin or
models.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from train.storage import atomic


class Place(NamedTuple):
    """Of a sequence in a batch."""

    row: int
    first: int  # slot


class Batch(NamedTuple):
    ids: Tensor  # int64 [B, T], 0 in the padding
    assistant: Tensor  # bool [B, T]: the target wrote this token; False in the padding and where a document begins
    rows: tuple[int, ...]  # which sequences of the data these are
    places: tuple[Place, ...] = ()  # and where
    starts: Tensor | None = None  # int64 [B, T]: where the document of a slot begins; None: each row is one document

    def to(self, device: torch.device) -> Batch:
        starts = None if self.starts is None else self.starts.to(device)
        return self._replace(ids=self.ids.to(device), assistant=self.assistant.to(device), starts=starts)


@dataclass(frozen=True)
class Sequences:
    """Sequences of any length, end to end: row r is `ids[offsets[r]:offsets[r + 1]]`."""

    ids: Tensor  # int64 [total]
    assistant: Tensor  # bool [total]
    offsets: Tensor  # int64 [rows + 1]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Sequences:
        lengths = torch.tensor([0, *(len(ids) for ids, _ in rows)])
        ids = torch.tensor([token for ids, _ in rows for token in ids], dtype=torch.int64)
        assistant = torch.tensor([flag for _, mask in rows for flag in mask], dtype=torch.bool)
        return cls(ids, assistant, lengths.cumsum(0))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.ids[span], self.assistant[span]

    def batch(self, rows: Sequence[int]) -> Batch:
        """The sequences, one a row, padded on the right to the longest of them."""
        return self.packed([[index] for index in rows])

    def packed(self, packs: Sequence[Sequence[int]]) -> Batch:
        """The sequences of each pack end to end in a row, padded on the right to the longest row."""
        lengths = self.lengths
        shape = len(packs), max(int(lengths[list(pack)].sum()) for pack in packs)
        ids = torch.zeros(shape, dtype=torch.int64)
        assistant = torch.zeros(shape, dtype=torch.bool)
        starts = torch.zeros(shape, dtype=torch.int64)
        rows, places = [], []
        for row, pack in enumerate(packs):
            first = 0
            for index in pack:
                own_ids, own_assistant = self.row(index)
                last = first + own_ids.numel()
                ids[row, first:last], assistant[row, first:last] = own_ids, own_assistant
                assistant[row, first] = False
                starts[row, first:] = first  # the padding belongs to the last one
                rows.append(index)
                places.append(Place(row, first))
                first = last
        alone = all(len(pack) == 1 for pack in packs)
        return Batch(ids, assistant, tuple(rows), tuple(places), None if alone else starts)

    def batches(self, rows: range, size: int, room: int | None = None) -> Iterator[Batch]:
        """All of `rows`, `size` packs of them at a time: of one sequence each, or of up to `room` tokens."""
        packs = [[index] for index in rows]
        if room is not None:
            packs = [[rows[item] for item in pack] for pack in best_fit(self.lengths[rows].tolist(), room)]
        for start in range(0, len(packs), size):
            yield self.packed(packs[start : start + size])

    def cut(self, length: int) -> Sequences:
        """Every row cut to `length` tokens; rows that then serve no slot are left out."""
        rows = []
        for index in range(len(self)):
            ids, assistant = (part[:length] for part in self.row(index))
            if (assistant[1:-1] & assistant[2:]).any():
                rows.append((ids, assistant))
        return Sequences(
            torch.cat([ids for ids, _ in rows]) if rows else self.ids[:0],
            torch.cat([assistant for _, assistant in rows]) if rows else self.assistant[:0],
            torch.tensor([0, *(ids.numel() for ids, _ in rows)]).cumsum(0),
        )

    def counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token, `[V]`."""
        return torch.bincount(self.ids[self.assistant], minlength=vocab_size)

    def content_hash(self) -> str:
        digest = hashlib.sha256()
        for part in (self.ids, self.assistant, self.offsets):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def tensors(self) -> dict[str, Tensor]:
        return {"ids": self.ids.to(torch.int32), "assistant": self.assistant, "offsets": self.offsets}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Sequences:
        return cls(tensors["ids"].to(torch.int64), tensors["assistant"], tensors["offsets"])

    def save(self, path: Path) -> None:
        """Whole or not there."""
        atomic.write_tensors(path, self.tensors())

    @classmethod
    def load(cls, path: Path) -> Sequences:
        try:
            return cls.from_tensors(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); delete it to have it made again") from error


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs of items, each of at most `room` in all: the longest item first, into the fullest pack that can take it.

    Depends on the lengths alone. No item may be longer than `room`.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # what is left -> packs
    rooms: list[int] = []  # its keys, ascending
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        assert lengths[item] <= room, "sequences are cut before they are packed"
        place = bisect_left(rooms, lengths[item])
        if place < len(rooms):
            left = rooms[place]
            pack = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        else:
            left, pack = room, len(packs)
            packs.append([])
        packs[pack].append(item)
        left -= lengths[item]
        if left not in by_room:
            insort(rooms, left)
        by_room.setdefault(left, []).append(pack)
    return packs


def seed_of(seed: int, number: int) -> int:
    """For what is random in batch `number`: 32 bits, since a generator on a CPU heeds no more."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "little")


def epoch_order(rows: int, seed: int, epoch: int) -> Tensor:
    """A permutation that depends on (seed, epoch) alone: where a run resumes is a position, not a sampler's state."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return torch.randperm(rows, generator=generator)


def rows_at(rows: int, position: int, count: int, seed: int) -> list[int]:
    """Rows number position .. position + count - 1 of the endless sequence of shuffled epochs."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(position + len(chosen), rows)
        chosen += epoch_order(rows, seed, epoch)[offset : offset + count - len(chosen)].tolist()
    return chosen
