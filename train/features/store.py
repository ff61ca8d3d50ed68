"""The target's hidden states of all sequences, computed once: in memory, or with features=offline in files.

    manifest.json            what the features depend on; a store with another manifest is refused
    shard-00000.safetensors  what `Layout` stores for the tokens of consecutive sequences, and a CRC-32 of each of these

Shards are written atomically, so an interrupted store can be completed by the same command or any other run with the
same features; processes divide the shards among themselves. Files are read row by row through memory maps. The data's
order, not the order of training, decides which sequences share a forward, so that a resumed run computes the same bits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from kernels.linear import WeightFormat
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from train.data import alignment
from train.data.sequences import Batch, Sequences
from train.features.layout import WHOLE, Layout
from train.features.online import Features, compute_features
from train.features.recorded import RecordedFeatures
from train.signals import Interrupted
from train.storage import atomic
from train.storage.provenance import git_state, versions
from train.storage.run_folder import tokenizer_record
from train.threads import WorkThreads

MANIFEST, FORMAT = "manifest.json", 3
SHARD_MB = 512  # an interruption loses at most about this much
LEAST_SHARDS = 32  # if there are enough sequences, so that an interruption loses little of a small store too
CHECKSUMS = "crc32"  # tensor of a shard, int64, one per sequence; a shard of an older version has none
OPEN_SHARDS = 64  # memory maps open at the same time
STATES = ("features", "scales")  # the tensors of a shard that hold hidden states


class Shard(NamedTuple):
    """Sequences `first` .. `last - 1`."""

    file: str
    first: int
    last: int


def manifest(
    target: LlamaTarget, tokenizer: Tokenizer, sequences: Sequences, layout: Layout, weights: WeightFormat = "same"
) -> dict[str, Any]:
    """Return all that the features depend on, and their layout. Stores with equal manifests have equal files."""
    return {
        **origin(target, tokenizer, layout, weights),
        "data": sequences.content_hash(),
        "sequences": len(sequences),
        "tokens": int(sequences.offsets[-1]),
    }


def origin(target: LlamaTarget, tokenizer: Tokenizer, layout: Layout, weights: WeightFormat) -> dict[str, Any]:
    """Return the part of a manifest that does not depend on the sequences."""
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "weights": weights,
        **layout.record(),
        **tokenizer_record(tokenizer),
        "shard_mb": SHARD_MB,
    }


def cut_shards(sequences: Sequences, token_bytes: int) -> list[Shard]:
    """Divide the sequences, in order, into shards of up to about SHARD_MB or 1/LEAST_SHARDS of all tokens."""
    shards: list[Shard] = []
    first, offsets = 0, sequences.offsets.tolist()
    room = max(1, min(int(SHARD_MB * 2**20 / token_bytes), offsets[-1] // LEAST_SHARDS))
    while first < len(sequences):
        last = first + 1
        while last < len(sequences) and offsets[last + 1] - offsets[first] <= room:
            last += 1
        shards.append(Shard(f"shard-{len(shards):05d}.safetensors", first, last))
        first = last
    return shards


def wider_layout(layout: Layout, wanted: dict[str, Any], folder: Path) -> Layout | None:
    """Return the layout of the store in `folder` if it adds layers to `wanted` and all other keys agree, else None.

    A store with or without what is known of the whole vocabulary serves either head.
    """
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        layers = tuple(stored["layers"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # no store, or one that open_store refuses
    agrees = all(stored.get(key) == value for key, value in wanted.items() if key not in ("layers", WHOLE))
    there = replace(layout, layers=layers, whole=WHOLE in stored)
    return there if agrees and there != layout and set(layout.layers) <= set(layers) else None


def open_store(folder: Path, wanted: dict[str, Any]) -> None:
    """Create the folder and its manifest, or check existing ones and remove unfinished files.

    Raises ValueError naming every difference if the store holds other features.
    """
    if refuse_other_store(folder, wanted) is None:
        atomic.make_folder(folder)
        record = {
            **wanted,
            "code": {"version": versions().get("headway"), **git_state()},
        }  # for people: none is refused
        atomic.write_text(folder / MANIFEST, json.dumps(record, indent=2) + "\n")
    else:
        atomic.sweep(folder)


def refuse_other_store(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a store that agrees in every key of `wanted`; None if there is no store yet.

    Raises ValueError naming every difference, or if the folder holds anything other than a store.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"features.path={folder}: holds something else than a store of features; give another folder"
            )
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}); give another features.path") from error
    different = [
        f"{key} is {stored.get(key)}, this run has {wanted[key]}"
        for key in sorted(wanted)
        if stored.get(key) != wanted[key]
    ]
    if different:
        raise ValueError(
            f"features.path={folder}: this store was made for something else: {'; '.join(different)}. Give another "
            "features.path, or none"
        )
    return stored


def refuse_small_disk(folder: Path, needed: int) -> None:
    """Raises ValueError if less than `needed` bytes are free, before anything is computed."""
    if not needed:  # a complete store may be read-only
        return
    _, free = atomic.free_disk(folder)
    if needed > free:
        raise ValueError(
            f"features=offline: the store in {folder} needs {needed / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free; "
            "give features.path= on a larger disk, fewer data.num_sequences, or features=online, which stores nothing"
        )


def open_shard(path: Path) -> dict[str, Any]:
    """Map a shard into memory: return slices of its tensors, by name."""
    file = safe_open(path, framework="pt")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of what is stored for a sequence, by name."""
    total = 0
    for name in sorted(tensors.keys() - {CHECKSUMS}):
        total = zlib.crc32(tensors[name].cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return total


class FeatureStore:
    """A `FeatureSource` over a store, usable once `fill` has run on every process."""

    def __init__(
        self, folder: Path, target: LlamaTarget, aux_layers: Sequence[int], sequences: Sequences, layout: Layout
    ) -> None:
        self.folder, self._target, self._sequences = folder, target, sequences
        self._aux_layers, self.layout = tuple(aux_layers), layout
        self._device = target.norm.weight.device
        self._shards = cut_shards(sequences, layout.token_bytes)
        self._shard_of = [shard for shard in self._shards for _ in range(shard.first, shard.last)]
        self._open = lru_cache(OPEN_SHARDS)(open_shard)

    @property
    def shards(self) -> int:
        return len(self._shards)

    @property
    def missing(self) -> list[Shard]:
        return [shard for shard in self._shards if not self._has(shard)]

    @property
    def missing_bytes(self) -> int:
        offsets = self._sequences.offsets
        tokens = sum(int(offsets[shard.last] - offsets[shard.first]) for shard in self.missing)
        return tokens * self.layout.token_bytes

    def fill(
        self,
        batch_size: int,
        share: tuple[int, int],
        check: Callable[[], None],
        *,
        room: int | None = None,
        show: bool,
        threads: WorkThreads | None = None,
        recorded: RecordedFeatures | None = None,
    ) -> None:
        """Compute this process's share of the missing shards; shards finished before `check` raises are kept.

        With `room`, sequences are packed into rows of up to that many tokens. What is `recorded` is not computed.
        """
        threads = threads or WorkThreads(torch.get_num_threads(), adaptive=False)
        rank, world = share
        missing = set(self.missing)
        todo = [shard for shard in self._shards[rank::world] if shard in missing]  # by number: others write too
        with tqdm(total=len(todo), desc="features", unit="shard", disable=not show, dynamic_ncols=True) as bar:
            for shard in todo:
                check()
                self._keep(shard, self._compute(shard, batch_size, room, check, threads, recorded))
                if recorded is not None and world == 1:  # else another process may still need its parts
                    recorded.stored(self._ids(shard))
                bar.update()

    def _has(self, shard: Shard) -> bool:
        return (self.folder / shard.file).is_file()

    def _keep(self, shard: Shard, tensors: dict[str, Tensor]) -> None:
        offsets = (
            self._sequences.offsets[shard.first : shard.last + 1] - self._sequences.offsets[shard.first]
        ).tolist()
        rows = ({name: value[low:high] for name, value in tensors.items()} for low, high in pairwise(offsets))
        sums = {CHECKSUMS: torch.tensor([checksum(row) for row in rows], dtype=torch.int64)}
        atomic.write_tensors(self.folder / shard.file, {**tensors, **sums})

    def _tensors(self, shard: Shard) -> Mapping[str, Any]:
        """Return the shard's tensors, or slices of its file, by name."""
        return self._open(self.folder / shard.file)

    def _ids(self, shard: Shard) -> list[Tensor]:
        return [self._sequences.row(index)[0] for index in range(shard.first, shard.last)]

    def _compute(
        self,
        shard: Shard,
        batch_size: int,
        room: int | None,
        check: Callable[[], None],
        threads: WorkThreads,
        recorded: RecordedFeatures | None = None,
    ) -> dict[str, Tensor]:
        layout, offsets = self.layout, self._sequences.offsets
        offsets = offsets - offsets[shard.first]  # in the shard
        size = int(offsets[shard.last])
        out: dict[str, Tensor] = {}

        def place(tensors: Mapping[str, Tensor], where: slice) -> None:
            for name, value in tensors.items():
                out.setdefault(name, value.new_empty(size, *value.shape[1:]))[where] = value

        missing = list[int]()
        for index, ids in enumerate(self._ids(shard), start=shard.first):
            if recorded is not None and (tensors := recorded.take(ids)) is not None:
                place(tensors, slice(int(offsets[index]), int(offsets[index + 1])))
            else:
                missing.append(index)
        for batch in self._sequences.batches(missing, batch_size, room):
            check()
            work = partial(compute_features, self._target, batch.to(self._device), layout.layers)
            features = threads.timed(work)
            states, taught = torch.stack(features.aux, dim=2), alignment.teacher_rows(batch.assistant)
            for row, stored in batch.spans(offsets):  # of states [B, T, layers, H]
                place(layout.encode(states[row], self._target, features.hidden[row], taught[row]), stored)
        return out

    def __call__(self, batch: Batch) -> Features:
        """Return the batch's features. Raises ValueError if a shard is missing or damaged."""
        out: dict[str, Tensor] = {}
        for row, place in zip(batch.rows, batch.places, strict=True):
            for name, value in self._read(row).items():
                padded = out.setdefault(name, value.new_zeros(*batch.ids.shape, *value.shape[1:]))
                padded[place.row, place.first : place.first + len(value)] = value
        states, rest = out.pop("features"), {name: value.to(self._device) for name, value in out.items()}
        return self.layout.features(self._aux_layers, states.to(self._device), rest)

    def _read(self, row: int) -> dict[str, Tensor]:
        """Return what is stored for the row's tokens, with hidden states decoded."""
        shard, offsets = self._shard_of[row], self._sequences.offsets
        begin = int(offsets[shard.first])
        low, high = int(offsets[row]) - begin, int(offsets[row + 1]) - begin
        path = self.folder / shard.file
        try:
            parts = dict(self._tensors(shard))
            sums = parts.pop(CHECKSUMS, None)
            tensors = {name: part[low:high] for name, part in parts.items()}
            if sums is not None and int(sums[row - shard.first : row - shard.first + 1]) != checksum(tensors):
                raise OSError("it is not as it was written")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: cannot be read ({error}); delete it if it is there, and run the same command again to have "
                "it made anew"
            ) from error
        if any(len(part) != high - low for part in tensors.values()):
            raise ValueError(f"{path}: holds fewer tokens than its manifest says; delete it to have it made again")
        states = self.layout.decode(tensors)
        return {"features": states} | {name: part for name, part in tensors.items() if name not in STATES}


class CachedFeatures(FeatureStore):
    """A store in memory. Its finished shards go to `folder` only if computing the others is interrupted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cache: dict[Shard, dict[str, Tensor]] = {}
        for shard in self._shards:
            with suppress(OSError, SafetensorError):
                tensors = load_file(self.folder / shard.file)
                tensors.pop(CHECKSUMS, None)
                self._keep(shard, tensors)

    def fill(self, *arguments: Any, **options: Any) -> None:
        try:
            super().fill(*arguments, **options)
        except Interrupted:
            atomic.make_folder(self.folder)
            for shard, tensors in self._cache.items():
                super()._keep(shard, tensors)
            raise
        atomic.discard(self.folder)

    def _has(self, shard: Shard) -> bool:
        return shard in self._cache

    def _keep(self, shard: Shard, tensors: dict[str, Tensor]) -> None:
        self._cache[shard] = {name: value.to(self._device) for name, value in tensors.items()}

    def _tensors(self, shard: Shard) -> Mapping[str, Any]:
        return self._cache[shard]
