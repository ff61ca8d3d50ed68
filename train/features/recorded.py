"""Features taken while the engine generates the responses: what it computes anyway is not computed a second time.

    part-0123456789abcdef.safetensors   what `Layout` stores for the tokens of some sequences, end to end, with
                                        sequences  uint8 [rows, 16]  hashes of their token ids
                                        offsets    int64 [rows + 1]  of their tokens

A store takes from these parts what they hold of its sequences, computes the rest, and deletes them. Values differ from
computed ones as sums in another order do: the engine's kernels are those of serving.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.learning.pieces import Pieces, Tensors, Turn, joined
from infer.learning.recording import Span
from kernels.copies import select_rows
from train.data.dialogue import Row
from train.data.examples import has_served_slot
from train.features.layout import Layout
from train.storage import atomic

PART_MB = 64  # an interruption loses at most about this much, which is then computed
INDEX = ("sequences", "offsets")


class FeatureRecorder:
    """Keeps the features of running requests and unfinished conversations; writes those of finished ones to `folder`.

    A `Recorder` (infer/learning/recording.py). Sequences are cut to their first `longest` tokens.
    """

    def __init__(self, layout: Layout, folder: Path, longest: int) -> None:
        self._layout, self._folder, self._longest = layout, folder, longest
        self._pieces = Pieces()
        self._conversations = defaultdict[int, list[Turn]](list)
        self._finished: list[tuple[bytes, Tensors]] = []
        self._bytes = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layout.layers

    def take_states(self, spans: Sequence[Span], states: Sequence[Tensor]) -> None:
        rows = [row for span in spans for row in span.rows]
        taken = select_rows(states, rows).view(len(rows), len(states), -1)
        self._pieces.add(spans, self._layout.encode_states(taken))

    def take_logits(self, spans: Sequence[Span], logits: Tensor) -> None:
        if self._layout.reads_logits:
            rows = [row for span in spans for row in span.rows]
            self._pieces.add(spans, self._layout.encode_logits(logits[rows]))

    def end_turn(self, request_id: str, conversation: int, tokens: list[int]) -> None:
        """Keep what was taken of a request, which has ended with these tokens, for its conversation."""
        self._conversations[conversation].append(Turn(tokens, self._pieces.pop(request_id)))

    def end(self, conversation: int, rows: Sequence[Row]) -> None:
        """Finish a conversation with these sequences."""
        turns = self._conversations.pop(conversation, [])
        for ids, mask in ((ids[: self._longest], mask[: self._longest]) for ids, mask in rows):
            tensors, begin = joined(turns, ids) if has_served_slot(mask) else ({}, 1)
            if begin == 0:
                self._finished.append((hash_of(torch.tensor(ids)), tensors))
                self._bytes += len(ids) * self._layout.token_bytes
        if self._bytes >= PART_MB * 2**20:
            self.flush()

    def flush(self) -> None:
        """Write the finished sequences to a part."""
        if not self._finished:
            return
        hashes, tensors = zip(*self._finished, strict=True)
        lengths = [len(each["features"]) for each in tensors]
        part = {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
        part["sequences"] = torch.tensor([list(each) for each in hashes], dtype=torch.uint8)
        part["offsets"] = torch.tensor([0, *lengths]).cumsum(0)
        atomic.make_folder(self._folder)
        atomic.write_tensors(self._folder / f"part-{secrets.token_hex(8)}.safetensors", part)
        self._finished, self._bytes = [], 0


def hash_of(ids: Tensor) -> bytes:
    """Return the hash of a sequence's ids, int64 `[N]`."""
    return hashlib.blake2b(ids.contiguous().numpy().tobytes(), digest_size=16).digest()


class RecordedFeatures:
    """What the parts in `folder` hold. A damaged part counts as missing."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        self._left = Counter[Path]()  # sequences of each part that are in no store yet
        self._used = set[Path]()
        self.num_bytes = 0
        for path in sorted(folder.glob("part-*.safetensors")):
            with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as part:
                hashes, offsets = part.get_tensor("sequences"), part.get_tensor("offsets").tolist()
                keys = [bytes(row) for row in hashes.tolist()]
                places = [(path, first, last) for first, last in itertools.pairwise(offsets)]
                self._places |= zip(keys, places, strict=True)
                self.num_bytes += path.stat().st_size
        self._left.update(path for path, _, _ in self._places.values())

    def __len__(self) -> int:
        return len(self._places)

    def take(self, ids: Tensor) -> Tensors | None:
        """Return what is stored for the tokens of a sequence; None if no part holds it."""
        place = self._places.get(hash_of(ids))
        if place is None:
            return None
        path, first, last = place
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as part:
            names = [name for name in part.keys() if name not in INDEX]  # noqa: SIM118
            return {name: part.get_slice(name)[first:last] for name in names}
        return None

    def stored(self, sequences: Iterable[Tensor], *, last: bool = False) -> None:
        """Note that a store holds these sequences; delete the parts it needs no more: with `last` all that it used."""
        for ids in sequences:
            place = self._places.pop(hash_of(ids), None)
            if place is not None:
                self._left[place[0]] -= 1
                self._used.add(place[0])
        for path in [path for path in self._used if last or not self._left[path]]:
            self._used.discard(path)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds other parts
                path.parent.rmdir()
