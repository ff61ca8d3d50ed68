"""The target's hidden states that a head learns from, taken from the target in this process.

Computed for the sequences of each batch, or once for all of them and kept in memory. Which layers: the head says.
Knows nothing about losses; what a feature means is DESIGN section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from models.attention import CausalAttention
from models.targets.llama import LAST, LlamaTarget
from train.config import OnlineFeaturesConfig
from train.data.sequences import Batch, Sequences
from train.objectives import alignment
from train.signals import Interrupted
from train.storage import atomic


class TopTokens(NamedTuple):
    """The target's likeliest tokens, descending."""

    log_probs: Tensor  # [B, T, k]
    ids: Tensor  # [B, T, k]


class Features(NamedTuple):
    aux: tuple[Tensor, ...]  # [B, T, H] per aux layer
    hidden: Tensor  # [B, T, H] after the final norm: the teacher's logits are the LM head's of this
    top: TopTokens | None = None  # what the teacher says in place of `hidden`, which is then [B, T, 0]


class FeatureSource(Protocol):
    """Contract: features of exactly the batch's rows; nothing is learned of padding. No gradients."""

    def __call__(self, batch: Batch) -> Features: ...


def target_features(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    """With gradients where the target has any."""
    positions = alignment.positions(batch.ids, batch.starts)
    output = target(batch.ids, positions, CausalAttention(batch.starts), aux_layers=aux_layers)
    return Features(output.aux, output.hidden)


@torch.no_grad()
def compute_features(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    return target_features(target, batch, aux_layers)


def stored_layers(aux_layers: Sequence[int]) -> list[int]:
    """The hidden states that the head and the teacher read between them."""
    return sorted({*aux_layers, LAST})


class OnlineFeatures:
    """The target runs for every batch."""

    def __init__(self, target: LlamaTarget, aux_layers: Sequence[int]) -> None:
        self.target, self.aux_layers = target, tuple(aux_layers)

    def __call__(self, batch: Batch) -> Features:
        return compute_features(self.target, batch, self.aux_layers)


class CachedFeatures:
    """Features of all sequences, computed once at the start, in the data's order.

    That order, and not the order in which training asks, decides which sequences share a forward: a resumed run
    computes the same bits again.
    """

    def __init__(
        self,
        target: LlamaTarget,
        aux_layers: Sequence[int],
        sequences: Sequences,
        batch_size: int,
        room: int | None = None,
        *,
        show: bool,
        check: Callable[[], None] = lambda: None,
        kept: Path | None = None,
    ) -> None:
        """With `room` sequences share a row of up to so many tokens. `check` is called often and may raise Interrupted.

        The file `kept`, whose name says what the features depend on, then holds what was computed, for the next time.
        """
        self._offsets = sequences.offsets
        self._device = target.norm.weight.device
        layers, total = stored_layers(aux_layers), int(sequences.offsets[-1])
        self._aux, self._hidden = [layers.index(layer) for layer in aux_layers], layers.index(LAST)
        dtype = target.norm.weight.dtype
        self._store = torch.empty(len(layers), total, target.config.hidden_size, dtype=dtype, device=self._device)
        batches = list(sequences.batches(range(len(sequences)), batch_size, room))
        done = self._take_up(kept) if kept else 0
        with tqdm(total=len(batches), initial=done, desc="features", unit="batch", disable=not show) as bar:
            try:
                for batch in batches[done:]:
                    check()
                    self._compute(target, batch, layers)
                    done += 1
                    bar.update()
            except Interrupted:
                if kept and done:
                    rows = [row for batch in batches[:done] for row in batch.rows]
                    self._keep(kept, done, int(self._offsets[max(rows) + 1]))
                raise
        if kept:
            kept.unlink(missing_ok=True)

    def _compute(self, target: LlamaTarget, batch: Batch, layers: Sequence[int]) -> None:
        features = compute_features(target, batch.to(self._device), layers)
        for row, place in zip(batch.rows, batch.places, strict=True):
            low, high = int(self._offsets[row]), int(self._offsets[row + 1])
            for part, feature in enumerate(features.aux):
                self._store[part, low:high] = feature[place.row, place.first : place.first + high - low]

    def _keep(self, file: Path, batches: int, tokens: int) -> None:
        """`tokens` reach to the end of the last sequence of the first `batches`."""
        file.parent.mkdir(parents=True, exist_ok=True)
        states = self._store[:, :tokens].contiguous().cpu()
        atomic.write_tensors(file, {"states": states, "batches": torch.tensor(batches)})

    def _take_up(self, file: Path) -> int:
        """How many batches an interrupted run has left; a file that cannot be read is none."""
        try:
            kept = load_file(file)
        except (OSError, SafetensorError):
            return 0
        self._store[:, : kept["states"].shape[1]] = kept["states"].to(self._device)
        return int(kept["batches"])

    def __call__(self, batch: Batch) -> Features:
        shape = (self._store.shape[0], *batch.ids.shape, self._store.shape[2])
        out = self._store.new_zeros(shape)  # [parts, B, T, H]
        for row, place in zip(batch.rows, batch.places, strict=True):
            low, high = int(self._offsets[row]), int(self._offsets[row + 1])
            out[:, place.row, place.first : place.first + high - low] = self._store[:, low:high]
        return Features(tuple(out[part] for part in self._aux), out[self._hidden])


def feature_bytes(target: LlamaTarget, aux_layers: Sequence[int], tokens: int) -> int:
    return len(stored_layers(aux_layers)) * tokens * target.config.hidden_size * target.norm.weight.element_size()


def make_features(
    config: OnlineFeaturesConfig,
    target: LlamaTarget,
    aux_layers: Sequence[int],
    sequences: Sequences,
    *,
    batch_size: int,
    room: int | None = None,
    show: bool = False,
    check: Callable[[], None] = lambda: None,
    kept: Path | None = None,
) -> FeatureSource:
    """The cached form while it fits `features.cache_gb`, else the target runs for every batch."""
    if feature_bytes(target, aux_layers, int(sequences.offsets[-1])) <= config.cache_gb * 1e9:
        return CachedFeatures(target, aux_layers, sequences, batch_size, room, show=show, check=check, kept=kept)
    return OnlineFeatures(target, aux_layers)
