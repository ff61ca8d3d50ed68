"""features=offline: the target's hidden states in files, computed once, read row by row through memory maps.

    manifest.json            what the features were made of; a store of anything else is refused
    shard-00000.safetensors  features [tokens, layers, H] of consecutive sequences; the manifest lists the layers

A shard is whole or not there, so an interrupted store is completed; processes share the shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from models.targets.llama import LAST, LlamaTarget
from models.tokenizer import Tokenizer
from train import atomic
from train.data import Batch, Sequences
from train.features import Features, compute_features, feature_bytes, stored_layers

MANIFEST, FORMAT = "manifest.json", 1
OPEN_SHARDS = 64  # maps held at once


class Shard(NamedTuple):
    """Sequences `first` .. `last - 1`."""

    file: str
    first: int
    last: int


def manifest(
    target: LlamaTarget, tokenizer: Tokenizer, sequences: Sequences, aux_layers: Sequence[int], shard_mb: int
) -> dict[str, Any]:
    """All that the features depend on, and their layout. Two equal ones have equal files."""
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "dtype": str(target.norm.weight.dtype).removeprefix("torch."),
        "layers": stored_layers(aux_layers),
        "hidden_size": target.config.hidden_size,
        "tokenizer": text_hash(tokenizer.backend.to_str()),
        "chat_template": text_hash(tokenizer.chat_template or ""),
        "data": sequences.content_hash(),
        "sequences": len(sequences),
        "tokens": int(sequences.offsets[-1]),
        "shard_mb": shard_mb,
    }


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def store_name(record: dict[str, Any]) -> str:
    return text_hash(json.dumps(record, sort_keys=True))


def cut_shards(sequences: Sequences, token_bytes: int, shard_mb: int) -> list[Shard]:
    """Consecutive sequences up to about `shard_mb` each."""
    room = max(1, int(shard_mb * 2**20 / token_bytes))
    shards: list[Shard] = []
    first, offsets = 0, sequences.offsets.tolist()
    while first < len(sequences):
        last = first + 1
        while last < len(sequences) and offsets[last + 1] - offsets[first] <= room:
            last += 1
        shards.append(Shard(f"shard-{len(shards):05d}.safetensors", first, last))
        first = last
    return shards


def open_store(folder: Path, wanted: dict[str, Any]) -> None:
    """Makes the folder and its manifest, or checks those that are there.

    Raises ValueError naming every difference when the store holds features of anything else.
    """
    path = folder / MANIFEST
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({error}); give another features.path") from error
        different = [
            f"{key} is {found.get(key)}, this run has {wanted.get(key)}"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        ]
        if different:
            raise ValueError(
                f"features.path={folder}: this store was made for something else: {'; '.join(different)}. Give another "
                "features.path, or none"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"features.path={folder}: holds something else than a store of features; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(wanted, indent=2) + "\n")


def refuse_small_disk(folder: Path, needed: int) -> None:
    """Raises ValueError, before anything is computed."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"features=offline: the store in {folder} needs {needed / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free; "
            "give features.path= on a larger disk, fewer data.num_sequences, or features=online, which stores nothing"
        )


class FeatureStore:
    """Contract of `FeatureSource`, once `fill` has run on every process."""

    def __init__(
        self, folder: Path, target: LlamaTarget, aux_layers: Sequence[int], sequences: Sequences, shard_mb: int
    ) -> None:
        self.folder, self._target, self._sequences = folder, target, sequences
        self._layers = stored_layers(aux_layers)
        self._aux, self._hidden = [self._layers.index(layer) for layer in aux_layers], self._layers.index(LAST)
        self._device, self._dtype = target.norm.weight.device, target.norm.weight.dtype
        self._shards = cut_shards(sequences, feature_bytes(target, aux_layers, 1), shard_mb)
        self._token_bytes = feature_bytes(target, aux_layers, 1)
        self._shard_of = [shard for shard in self._shards for _ in range(shard.first, shard.last)]
        self._maps: OrderedDict[str, Any] = OrderedDict()

    @property
    def missing(self) -> list[Shard]:
        return [shard for shard in self._shards if not (self.folder / shard.file).is_file()]

    @property
    def missing_bytes(self) -> int:
        offsets = self._sequences.offsets
        tokens = sum(int(offsets[shard.last] - offsets[shard.first]) for shard in self.missing)
        return tokens * self._token_bytes

    def fill(self, batch_size: int, share: tuple[int, int], check: Callable[[], None], *, show: bool) -> None:
        """Computes this process's share of what is missing; what is finished when `check` raises is kept."""
        atomic.sweep(self.folder)
        rank, world = share
        missing = set(self.missing)
        todo = [shard for shard in self._shards[rank::world] if shard in missing]  # by number: others are at work too
        with tqdm(total=len(todo), desc="features", unit="shard", disable=not show, dynamic_ncols=True) as bar:
            for shard in todo:
                atomic.write_tensors(self.folder / shard.file, {"features": self._compute(shard, batch_size, check)})
                bar.update()

    def _compute(self, shard: Shard, batch_size: int, check: Callable[[], None]) -> Tensor:
        offsets, begin = self._sequences.offsets, int(self._sequences.offsets[shard.first])
        size = int(offsets[shard.last]) - begin
        out = torch.empty(size, len(self._layers), self._target.config.hidden_size, dtype=self._dtype)
        for first in range(shard.first, shard.last, batch_size):
            check()
            batch = self._sequences.batch(range(first, min(first + batch_size, shard.last))).to(self._device)
            features = compute_features(self._target, batch, self._layers)
            for index, row in enumerate(batch.rows):
                low, high = int(offsets[row]) - begin, int(offsets[row + 1]) - begin
                for part, feature in enumerate(features.aux):
                    out[low:high, part] = feature[index, : high - low].to("cpu")
        return out

    def __call__(self, batch: Batch) -> Features:
        """Raises ValueError when a shard has vanished or is damaged."""
        shape = (len(self._layers), *batch.ids.shape, self._target.config.hidden_size)
        out = torch.zeros(shape, dtype=self._dtype)  # [parts, B, T, H]
        for index, row in enumerate(batch.rows):
            features = self._read(row)
            out[:, index, : len(features)] = features.transpose(0, 1)
        out = out.to(self._device)
        return Features(tuple(out[part] for part in self._aux), out[self._hidden])

    def _read(self, row: int) -> Tensor:
        """`[tokens of the row, layers, H]`"""
        shard, offsets = self._shard_of[row], self._sequences.offsets
        begin = int(offsets[shard.first])
        low, high = int(offsets[row]) - begin, int(offsets[row + 1]) - begin
        path = self.folder / shard.file
        try:
            if shard.file not in self._maps:
                self._maps[shard.file] = safe_open(path, framework="pt").get_slice("features")
                if len(self._maps) > OPEN_SHARDS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(shard.file)
            features = self._maps[shard.file][low:high]
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: cannot be read ({error}); delete it if it is there, and run the same command again to have "
                "it made anew"
            ) from error
        if len(features) != high - low:
            raise ValueError(f"{path}: holds fewer tokens than its manifest says; delete it to have it made again")
        return features
