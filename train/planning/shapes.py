"""Target and head of a run on the meta device: their shapes, before any weight is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from infer.options.devices import resolve_dtype
from models.checkpoint import fingerprint, has_weights
from models.heads.base import Head
from models.targets import check_weights, empty_target, resolve_checkpoint
from models.targets.llama import LlamaTarget
from train.config import TrainConfig
from train.preparation.head import make_head


class Shapes(NamedTuple):
    target: LlamaTarget  # in its dtype; `fingerprint` is empty if its weights are not downloaded yet
    head: Head
    checkpoint: Path  # the target's folder; no weights are downloaded


def shapes(config: TrainConfig) -> Shapes:
    """Build both. Raises ValueError for a target that cannot be loaded and for a head that does not fit it."""
    name = config.model.path_or_hub_id
    checkpoint = resolve_checkpoint(name, config.model.revision, weights=False)
    target = empty_target(checkpoint).to(resolve_dtype(config.model))
    target.path, target.folder = name, checkpoint
    from_hub = checkpoint != Path(name).expanduser()
    if has_weights(checkpoint) or not from_hub:  # of a hub id maybe only the configuration was fetched so far
        check_weights(checkpoint, target)
        target.fingerprint = fingerprint(checkpoint)
    with torch.device("meta"):
        return Shapes(target, make_head(config.head, target.config), checkpoint)


def processes() -> int:
    """Return the number of processes of this run, as started by torchrun or accelerate."""
    return int(os.environ.get("WORLD_SIZE", "1"))
