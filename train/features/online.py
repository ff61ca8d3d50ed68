"""Features (the target's hidden states that a head is trained on), computed by the target for every batch.

The head defines the layers. Independent of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention import CausalAttention
from models.config import LAST
from models.targets.llama import LlamaTarget
from train.config import FeaturesConfig, OnlineFeaturesConfig
from train.data import alignment
from train.data.sequences import Batch


class TopTokens(NamedTuple):
    """The target's k most likely tokens, in descending order."""

    log_probs: Tensor  # [B, T, k]
    ids: Tensor  # [B, T, k]


class WholeVocabulary(NamedTuple):
    """What the teacher needs of the target's logits beyond the draft vocabulary; 0 where it is not known."""

    log_z: Tensor  # fp32 [B, T], their log-sum-exp
    choice: Tensor  # int64 [B, T], their argmax


class Features(NamedTuple):
    aux: tuple[Tensor, ...]  # [B, T, H] per aux layer
    hidden: Tensor  # [B, T, H] after the final norm; the LM head maps it to the teacher's logits
    top: TopTokens | None = None  # the teacher, in place of `hidden`, which is then [B, T, 0]
    whole: WholeVocabulary | None = None


FeatureSource = Callable[[Batch], Features]  # of exactly the batch's rows, without gradients


def target_features(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    """Compute features, with gradients if the target has trainable parameters."""
    positions = alignment.positions(batch.ids, batch.starts)
    output = target(batch.ids, positions, CausalAttention(batch.starts), aux_layers=aux_layers)
    return Features(output.aux, output.hidden)


compute_features = torch.no_grad()(target_features)


def stored_layers(aux_layers: Sequence[int]) -> list[int]:
    """Return the layers whose hidden states the head or the teacher reads."""
    return sorted({*aux_layers, LAST})


def online_features(target: LlamaTarget, aux_layers: Sequence[int]) -> FeatureSource:
    """Return the features computed by running the target for every batch."""
    return lambda batch: compute_features(target, batch, aux_layers)


def feature_bytes(target: LlamaTarget, aux_layers: Sequence[int], tokens: int) -> int:
    return len(stored_layers(aux_layers)) * tokens * target.config.hidden_size * target.norm.weight.element_size()


def fits_cache(config: FeaturesConfig, target: LlamaTarget, aux_layers: Sequence[int], tokens: int) -> bool:
    """Return whether the features of all `tokens` are computed once and kept in memory."""
    size = feature_bytes(target, aux_layers, tokens)
    return isinstance(config, OnlineFeaturesConfig) and size <= config.cache_gb * 1e9
