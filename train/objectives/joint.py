"""Training head and target together, as Medusa-2 does (arXiv 2401.10774).

After a first stage for the heads alone, the target is trained too, so that the heads predict it better;
self-distillation keeps it close to the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.heads.objectives import JointObjectiveConfig
from models.lora import adapt
from models.targets.llama import LlamaTarget
from train.data.sequences import Batch
from train.features.online import Features, target_features
from train.objectives import alignment
from train.objectives import teacher as teaching
from train.objectives.base import Objective, StepSums, slot_weights
from train.objectives.losses import SoftCrossEntropy
from train.objectives.teacher import Teacher

LORA_ALPHA = 16.0  # the paper's
LORA_RATE = 0.25  # the adapters' learning rate, as a share of the heads', which start from nothing


class JointObjective(Objective):
    """Trains the heads alone for the first part of a run, then also adapters of the target (models/lora.py).

    The teacher is the unadapted target, both for the heads and for the adapted target.
    """

    config: JointObjectiveConfig
    target: LlamaTarget

    def adapt_target(self, target: LlamaTarget, seed: int = 0) -> None:
        """Insert adapters in place; nothing else of `target`, which must not be packed, is trained. Call once."""
        config = self.config
        adapt(target.layers, config.lora_on, rank=config.lora_rank, alpha=LORA_ALPHA, seed=seed)
        self.target = target

    @property
    def trained(self) -> nn.Module:
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        adapters = [p for p in self.target.parameters() if p.requires_grad]
        return [*super().parameter_groups(), {"params": adapters, "scale": LORA_RATE}]

    def forward(
        self,
        batch: Batch,
        features: Features,
        teacher: Teacher,
        denominators: Tensor,
        metrics: bool = True,
        generator: torch.Generator | None = None,
        progress: float = 0.0,
    ) -> tuple[Tensor, StepSums]:
        if progress <= self.config.heads_first:
            return super().forward(batch, features, teacher, denominators, metrics, generator)
        with torch.autocast(batch.ids.device.type, enabled=False):  # the target runs in the precision of serving
            with recomputing(self.target.layers if self.config.checkpointing else ()):
                adapted = target_features(self.target, batch, self.head.config.aux_layers)
            drift = self.drift(batch, adapted.hidden, teacher) / denominators[0].clamp(min=1)
        loss, sums = super().forward(batch, adapted, teacher, denominators, metrics, generator)
        return drift + self.config.heads_weight * loss, sums

    def drift(self, batch: Batch, hidden: Tensor, teacher: Teacher) -> Tensor:
        """Return Σ over served slots of weight * KL(original || adapted); `hidden` `[B, T, H]` is of the adapted."""
        served = alignment.step_masks(batch.assistant, 1)
        weights = slot_weights(served, self.config.reduction, batch.starts)[0][0][served[0]]  # [R], in slot order
        rows = hidden[alignment.teacher_rows(batch.assistant)]  # [R, H]
        size = max(1, teaching.CHUNK_ELEMENTS // self.target.config.vocab_size)
        parts = zip(rows.split(size), teacher.hidden.split(size), weights.split(size), strict=True)
        return torch.stack([checkpoint(self._drift_chunk, *part, use_reentrant=False) for part in parts]).sum()

    def _drift_chunk(self, rows: Tensor, before: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = self.target.logits(before).float().log_softmax(-1)
        p = log_p.exp()
        costs = SoftCrossEntropy.apply(self.target.logits(rows).float(), p) + torch.linalg.vecdot(p, log_p)
        return (costs * weights).sum()


@contextmanager
def recomputing(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, `layers` save only their inputs; backward recomputes them (activation checkpointing)."""
    layers = list(layers)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
