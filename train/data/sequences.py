"""Token sequences with the mask of what the target generated, their packing into rows, and the order of training.

Ids and masks are stored as they were generated and never rendered again. Independent of models and of where prompts
come from.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infer.request import Completion
from train.storage import atomic

EMPTY = torch.zeros(0, dtype=torch.int64)


class Place(NamedTuple):
    """Where a sequence lies in a batch."""

    row: int
    first: int  # slot


class Batch(NamedTuple):
    ids: Tensor  # int64 [B, T], 0 in the padding
    assistant: Tensor  # bool [B, T]: the target generated this token; False in padding and at a document's first slot
    rows: tuple[int, ...]  # indices of the sequences in the data
    places: tuple[Place, ...] = ()  # of these sequences in the batch
    starts: Tensor | None = None  # int64 [B, T]: first slot of each slot's document; None: each row is one document

    def to(self, device: torch.device) -> Batch:
        starts = None if self.starts is None else self.starts.to(device)
        return self._replace(ids=self.ids.to(device), assistant=self.assistant.to(device), starts=starts)

    def spans(self, offsets: Tensor) -> Iterator[tuple[tuple[int, slice], slice]]:
        """Yield where each sequence lies in the batch, and where among all tokens: row r begins at offsets[r]."""
        for row, place in zip(self.rows, self.places, strict=True):
            low, high = int(offsets[row]), int(offsets[row + 1])
            yield (place.row, slice(place.first, place.first + high - low)), slice(low, high)


@dataclass(frozen=True)
class Sequences:
    """Sequences of any length, end to end: row r is `ids[offsets[r]:offsets[r + 1]]`."""

    ids: Tensor  # int64 [total]
    assistant: Tensor  # bool [total]
    offsets: Tensor  # int64 [rows + 1]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Sequences:
        tensors = [(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)) for ids, mask in rows]
        return cls.joined(tensors)

    @classmethod
    def joined(cls, rows: Sequence[tuple[Tensor, Tensor]]) -> Sequences:
        """Return ids and mask of each row end to end."""
        offsets = torch.tensor([0, *(ids.numel() for ids, _ in rows)]).cumsum(0)
        ids, assistant = (torch.cat(parts) for parts in zip(*rows, strict=True)) if rows else (EMPTY, EMPTY.bool())
        return cls(ids, assistant, offsets)

    @classmethod
    def of_completions(cls, completions: Sequence[Completion]) -> Sequences:
        """Return the engine's prompts and responses, one row each."""
        parts = [(c.prompt_ids, c.token_ids) for c in completions]
        return cls.of([(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for prompt, ids in parts])

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.ids[span], self.assistant[span]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the sequences, one per row, padded on the right to the longest of them."""
        return self.packed([[index] for index in rows])

    def packed(self, packs: Sequence[Sequence[int]]) -> Batch:
        """Return the sequences of each pack end to end in one row, padded on the right to the longest row."""
        lengths = self.lengths
        shape = len(packs), max(int(lengths[list(pack)].sum()) for pack in packs)
        ids = torch.zeros(shape, dtype=torch.int64)
        assistant = torch.zeros(shape, dtype=torch.bool)
        starts = torch.zeros(shape, dtype=torch.int64)
        rows, places = [], []
        for row, pack in enumerate(packs):
            first = 0
            for index in pack:
                sequence_ids, sequence_mask = self.row(index)
                last = first + sequence_ids.numel()
                ids[row, first:last], assistant[row, first:last] = sequence_ids, sequence_mask
                assistant[row, first] = False
                starts[row, first:] = first  # padding counts as part of the last document
                rows.append(index)
                places.append(Place(row, first))
                first = last
        alone = all(len(pack) == 1 for pack in packs)
        return Batch(ids, assistant, tuple(rows), tuple(places), None if alone else starts)

    def batches(self, rows: Sequence[int], size: int, room: int | None = None) -> Iterator[Batch]:
        """Yield `rows` in batches of `size` packs; a pack is one sequence or, with `room`, up to `room` tokens."""
        packs = [[index] for index in rows]
        if room is not None:
            packs = [[rows[item] for item in pack] for pack in best_fit(self.lengths[rows].tolist(), room)]
        for start in range(0, len(packs), size):
            yield self.packed(packs[start : start + size])

    def select(self, rows: Sequence[int]) -> Sequences:
        """Return these rows."""
        return Sequences.joined([self.row(index) for index in rows])

    def cut(self, length: int) -> Sequences:
        """Return the rows truncated to `length` tokens, without those that then have no served slot."""
        rows = []
        for index in range(len(self)):
            ids, assistant = (part[:length] for part in self.row(index))
            if (assistant[1:-1] & assistant[2:]).any():
                rows.append((ids, assistant))
        return Sequences.joined(rows)

    def by_turn(self) -> Sequences:
        """Return a row for each of the target's turns: what precedes it, and it alone under the mask."""
        rows = []
        for index in range(len(self)):
            ids, assistant = self.row(index)
            ends, begin = (assistant & ~torch.cat([assistant[1:], assistant.new_zeros(1)])).nonzero().flatten() + 1, 0
            for end in ends.tolist():
                mask = assistant[:end] & (torch.arange(end) >= begin)
                rows += [(ids[:end], mask)] if (mask[1:-1] & mask[2:]).any() else []
                begin = end
        return Sequences.joined(rows)

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often the target generated each token, `[V]`."""
        return torch.bincount(self.ids[self.assistant], minlength=vocab_size)

    def content_hash(self) -> str:
        digest = hashlib.sha256()
        for part in (self.ids, self.assistant, self.offsets):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        tensors = {"ids": self.ids.to(torch.int32), "assistant": self.assistant, "offsets": self.offsets}
        atomic.write_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path) -> Sequences:
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); delete it to have it made again") from error
        return cls(tensors["ids"].to(torch.int64), tensors["assistant"], tensors["offsets"])


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items by best-fit decreasing: the longest first, each into the fullest pack that has room for it.

    A pack's lengths sum to at most `room`, and no item may be longer. Deterministic in the lengths: of packs with equal
    room the one that was changed last is taken.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int, list[int]]] = []  # ascending: tokens left, -number of its last change, pack
    for number, item in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        assert lengths[item] <= room, "sequences are cut before they are packed"
        place = bisect_left(rooms, (lengths[item],))
        if place < len(rooms):
            left, _, pack = rooms.pop(place)
        else:
            left, pack = room, []
            packs.append(pack)
        pack.append(item)
        insort(rooms, (left - lengths[item], -number, pack))
    return packs


def seed_of(seed: int, number: int) -> int:
    """Return the random seed of batch `number`: 32 bits, since a CPU generator uses no more."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "little")


def epoch_order(rows: int, seed: int, epoch: int) -> Tensor:
    """Return an epoch's permutation, which depends on (seed, epoch) alone, so a run resumes from a position only."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return torch.randperm(rows, generator=generator)


def rows_at(rows: int, position: int, count: int, seed: int) -> list[int]:
    """Return rows position .. position + count - 1 of the endless sequence of shuffled epochs."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(position + len(chosen), rows)
        chosen += epoch_order(rows, seed, epoch)[offset : offset + count - len(chosen)].tolist()
    return chosen
