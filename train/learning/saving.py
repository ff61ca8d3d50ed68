"""How heads are written that learn from what is served, and the untrained one that learns from nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infer.devices import resolve_dtype
from infer.options.cli import compose
from infer.options.exported_heads import is_head
from models.heads.base import Head
from models.heads.files import save_head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from train.config import LearnConfig, TrainConfig
from train.preparation.models import give_vocabulary, make_head
from train.storage import atomic
from train.storage.provenance import target_name


def write_head(head: Head, folder: Path, config: LearnConfig, target: LlamaTarget, facts: dict[str, Any]) -> None:
    """Write a head to `folder`, in the target's dtype, with `facts` in its provenance."""
    name, dtype = target_name(config.model), resolve_dtype(config.model)
    record = {"target_fingerprint": target.fingerprint, "target": name, **facts}
    verifier = {"verifier": name, "verifier_architecture": target.config.architecture}
    with atomic.replace_folder(folder) as staging:
        save_head(head, staging, **verifier, speculative_tokens=config.draft_tokens, provenance=record, dtype=dtype)


def untrained(config: LearnConfig, folder: Path) -> Path:
    """Write to `folder`, unless one is there, the head that `python train/run.py head=...` begins with.

    Its draft vocabulary are special tokens and the lowest ids, which in most tokenizers are the most frequent ones,
    since nothing has been generated yet that could be counted. Returns `folder`.
    """
    if is_head(folder):
        return folder
    training = replace(compose("train", TrainConfig, [f"head={config.head.name}"]), model=config.model)
    target = load_target(config.model.path_or_hub_id, revision=config.model.revision, layers=())
    head = make_head(training.head, target.config)
    give_vocabulary(head, training, target, torch.zeros(target.config.vocab_size), Tokenizer.load(target.folder))
    write_head(head, folder, config, target, {"untrained": True})
    return folder
