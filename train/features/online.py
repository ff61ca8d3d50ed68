"""Features (the target's hidden states that a head is trained on), computed by the target in this process.

Computed for each batch, or once for all sequences and cached in memory. The head defines the layers. Independent of
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from models.attention import CausalAttention
from models.config import LAST
from models.targets.llama import LlamaTarget
from train.config import FeaturesConfig, OnlineFeaturesConfig
from train.data.sequences import Batch, Sequences
from train.objectives import alignment
from train.preparation.threads import WorkThreads
from train.signals import Interrupted
from train.storage import atomic


class TopTokens(NamedTuple):
    """The target's k most likely tokens, in descending order."""

    log_probs: Tensor  # [B, T, k]
    ids: Tensor  # [B, T, k]


class Features(NamedTuple):
    aux: tuple[Tensor, ...]  # [B, T, H] per aux layer
    hidden: Tensor  # [B, T, H] after the final norm; the LM head maps it to the teacher's logits
    top: TopTokens | None = None  # the teacher, in place of `hidden`, which is then [B, T, 0]


FeatureSource = Callable[[Batch], Features]  # of exactly the batch's rows, without gradients


def target_features(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    """Compute features, with gradients if the target has trainable parameters."""
    positions = alignment.positions(batch.ids, batch.starts)
    output = target(batch.ids, positions, CausalAttention(batch.starts), aux_layers=aux_layers)
    return Features(output.aux, output.hidden)


@torch.no_grad()
def compute_features(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    return target_features(target, batch, aux_layers)


def stored_layers(aux_layers: Sequence[int]) -> list[int]:
    """Return the layers whose hidden states the head or the teacher reads."""
    return sorted({*aux_layers, LAST})


def online_features(target: LlamaTarget, aux_layers: Sequence[int]) -> FeatureSource:
    """Return the features computed by running the target for every batch."""
    return lambda batch: compute_features(target, batch, aux_layers)


class CachedFeatures:
    """Features of all sequences, computed once at the start, in the data's order.

    The data's order, not the order of training, decides which sequences share a forward, so that a resumed run
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
        threads: WorkThreads | None = None,
    ) -> None:
        """Compute all features. With `room`, sequences are packed into rows of up to that many tokens.

        `check` is called often and may raise Interrupted. What was computed is then saved in the file `kept`, whose
        name identifies what the features depend on, and reused by the next run.
        """
        self._offsets = sequences.offsets
        self._device = target.norm.weight.device
        layers, total = stored_layers(aux_layers), int(sequences.offsets[-1])
        self._aux, self._hidden = [layers.index(layer) for layer in aux_layers], layers.index(LAST)
        dtype = target.norm.weight.dtype
        self._store = torch.empty(len(layers), total, target.config.hidden_size, dtype=dtype, device=self._device)
        threads = threads or WorkThreads(torch.get_num_threads(), adaptive=False)
        batches = list(sequences.batches(range(len(sequences)), batch_size, room))
        done = self._load_saved(kept) if kept else 0
        with tqdm(total=len(batches), initial=done, desc="features", unit="batch", disable=not show) as bar:
            try:
                for batch in batches[done:]:
                    check()
                    threads.timed(batch.ids.numel(), partial(self._compute, target, batch, layers))
                    done += 1
                    bar.update()
            except Interrupted:
                if kept and done:
                    rows = [row for batch in batches[:done] for row in batch.rows]
                    self._save(kept, done, int(self._offsets[max(rows) + 1]))
                raise
        if kept:
            kept.unlink(missing_ok=True)

    def _compute(self, target: LlamaTarget, batch: Batch, layers: Sequence[int]) -> None:
        features = compute_features(target, batch.to(self._device), layers)
        for place, stored in batch.spans(self._offsets):
            for part, feature in enumerate(features.aux):
                self._store[part, stored] = feature[place]

    def _save(self, file: Path, batches: int, tokens: int) -> None:
        """Save the first `batches`; `tokens` is the end of their last sequence."""
        atomic.make_folder(file.parent)
        states = self._store[:, :tokens].contiguous().cpu()
        atomic.write_tensors(file, {"states": states, "batches": torch.tensor(batches)})

    def _load_saved(self, file: Path) -> int:
        """Load the batches saved by an interrupted run and return their number; 0 if the file cannot be read."""
        try:
            kept = load_file(file)
        except (OSError, SafetensorError):
            return 0
        self._store[:, : kept["states"].shape[1]] = kept["states"].to(self._device)
        return int(kept["batches"])

    def __call__(self, batch: Batch) -> Features:
        shape = (self._store.shape[0], *batch.ids.shape, self._store.shape[2])
        out = self._store.new_zeros(shape)  # [parts, B, T, H]
        for (row, slots), stored in batch.spans(self._offsets):
            out[:, row, slots] = self._store[:, stored]
        return Features(tuple(out[part] for part in self._aux), out[self._hidden])


def feature_bytes(target: LlamaTarget, aux_layers: Sequence[int], tokens: int) -> int:
    return len(stored_layers(aux_layers)) * tokens * target.config.hidden_size * target.norm.weight.element_size()


def fits_cache(config: FeaturesConfig, target: LlamaTarget, aux_layers: Sequence[int], tokens: int) -> bool:
    """Return whether the features of all `tokens` are computed once and kept in memory."""
    size = feature_bytes(target, aux_layers, tokens)
    return isinstance(config, OnlineFeaturesConfig) and size <= config.cache_gb * 1e9
