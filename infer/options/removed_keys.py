"""Keys that earlier versions had: what a command line that sets one is told, and how a config that has one is read.

A run of an earlier version stays resumable: its config.yaml holds these keys, and is read as long as the value is what
every run has now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONSTANT: dict[str, Any] = {  # key -> its value now; the constant's comment says why
    "engine.graph_batches": "1, 2, 4, ... engine.max_batch",
    "engine.graph_rows": "up to engine.max_rows",
    "engine.graph_context": 32768,
    "engine.rounds_ahead": "1 with graphs",
    "optim.eps": 1e-8,
    "objective.kl_scale": 1.0,
    "objective.kl_decay": 1.0,
    "objective.regression_weight": 1.0,
    "objective.distribution_weight": 0.1,
    "objective.lora_alpha": 16.0,
    "objective.lora_rate": 0.25,
    "features.shard_mb": 512,
    "head.n_candidates": 5,
    "head.top_k_tokens_per_head": None,  # null was 5, 4, 3, 2, 1, 1, ...
    "parallel.patience_minutes": 360.0,
}
RENAMED = {
    "proposer.tree_width": "proposer.tree=beam:<width>x<depth>",
    "proposer.tree_nodes": "proposer.tree=beam:<width>x<depth>:<nodes> or measured:<nodes>",
}
WITHOUT_EFFECT = ("engine.", "parallel.patience_minutes")  # no update depended on these: any value will do


def removal(key: str) -> str | None:
    """Return what became of a key of an earlier version, None for any other."""
    if key in CONSTANT:
        value = "null" if CONSTANT[key] is None else CONSTANT[key]
        return f"{key}: no longer a key; it is always {value}"
    return f"{key}: no longer a key; use {RENAMED[key]}" if key in RENAMED else None


def drop_constants(config: DictConfig, path: Path) -> None:
    """Remove the keys in CONSTANT from a config read from `path`. Raises ValueError for one with another value."""
    for key, value in CONSTANT.items():
        group, _, name = key.partition(".")
        keys = OmegaConf.select(config, group)
        if isinstance(keys, DictConfig) and name in keys:
            if keys[name] != value and not key.startswith(WITHOUT_EFFECT):
                raise ValueError(f"{path}: {key}={keys[name]}: no longer a key; it is always {value}")
            del keys[name]
