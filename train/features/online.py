"""Features (the target's hidden states that a head is trained on), computed by the target for every batch.

The head defines the layers. Independent of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.attention import BlockAttention, CausalAttention
from models.config import LAST
from models.targets.llama import LlamaTarget
from train.config import FeaturesConfig, OnlineFeaturesConfig
from train.data.sequences import Batch
from train.objectives import alignment


class TopTokens(NamedTuple):
    """The target's k most likely tokens, in descending order."""

    log_probs: Tensor  # [B, T, k]
    ids: Tensor  # [B, T, k]


class TargetContext(CausalAttention):
    """The attention of a target over a batch that keeps what it takes to run the target on tokens behind its slots."""

    def __init__(self, target: LlamaTarget, starts: Tensor | None = None) -> None:
        super().__init__(starts)
        self.target, self.keys = target, dict[int, tuple[Tensor, Tensor]]()  # keys and values by layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **scoring: Any) -> Tensor:
        self.keys[layer] = k, v
        return super().__call__(layer, q, k, v, **scoring)


class Features(NamedTuple):
    aux: tuple[Tensor, ...]  # [B, T, H] per aux layer
    hidden: Tensor  # [B, T, H] after the final norm; the LM head maps it to the teacher's logits
    top: TopTokens | None = None  # the teacher, in place of `hidden`, which is then [B, T, 0]
    context: TargetContext | None = None  # where the head is trained on drafts of its own


FeatureSource = Callable[[Batch], Features]  # of exactly the batch's rows, without gradients


def target_features(
    target: LlamaTarget, batch: Batch, aux_layers: Sequence[int], attention: CausalAttention | None = None
) -> Features:
    """Compute features, with gradients if the target has trainable parameters."""
    positions = alignment.positions(batch.ids, batch.starts)
    output = target(batch.ids, positions, attention or CausalAttention(batch.starts), aux_layers=aux_layers)
    return Features(output.aux, output.hidden)


compute_features = torch.no_grad()(target_features)


def features_in_context(target: LlamaTarget, batch: Batch, aux_layers: Sequence[int]) -> Features:
    """Compute features as `compute_features` does, and keep what `branch_states` reads."""
    context = TargetContext(target, batch.starts)
    return compute_features(target, batch, aux_layers, context)._replace(context=context)


@torch.no_grad()
def branch_states(context: TargetContext, batch: Batch, slots: Tensor, tokens: Tensor) -> Tensor:
    """Return the target's states past its norm, `[B, M, D, H]`, at `tokens` `[B, M, D]` drafted from slots `[B, M]`.

    The branch of slot i follows t[i+1]: its rows see the sequence up to there and those before them in the branch, as
    in a verify. Rows behind the last position of the batch come out wrong; no loss reads them.
    """
    places = alignment.positions(batch.ids, batch.starts)
    attention = BlockAttention((slots + 1).clamp(max=batch.ids.shape[1] - 1), batch.starts)
    for layer, keys in context.keys.items():
        attention.write(layer, *keys)
    depths = range(2, 2 + tokens.shape[-1])
    positions = [alignment.at(alignment.draft_positions(places, depth), slots) for depth in depths]
    return context.target(tokens, torch.stack(positions, dim=-1), attention.attend(causal=True)).hidden


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
