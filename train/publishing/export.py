"""Exports a trained head to outputs/heads/<model>/<head>: config and weights, provenance, model card (card.py).

The folder is replaced atomically. Before that, the exported files are loaded back and measured by the caller's
`measure`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.console.command_words import HEAD_FOLDER, OUTPUTS, TARGET_FOLDER, head_words, model_overrides, portable_path
from infer.options.exported_heads import export_folder, is_head, shipped_heads
from models.heads import HEADS
from models.heads.base import Head
from models.heads.config import HeadConfig
from models.heads.files import load_head, save_head
from models.heads.measurement import best_measured
from models.targets.llama import LlamaTarget
from models.targets.writing import copy_beside
from train.acceptance import Measured
from train.config import TrainConfig
from train.publishing.card import README, card
from train.storage import atomic
from train.storage.provenance import hub_id, portable, target_name
from train.storage.run_folder import refusal


def export_head(
    head: Head,
    target: LlamaTarget,
    config: TrainConfig,
    provenance: Mapping[str, Any],
    measure: Callable[[Head], Measured],
) -> tuple[Path, Measured]:
    """Export the head in the target's dtype. `measure` gets the head as serving will load it.

    If another run has exported to its folder meanwhile, it goes to one beside, which is returned. No written file
    contains a path of this machine.
    """
    wanted = export_folder(config.head, config.output_dir, config.model.name)
    folder = wanted
    dtype = target.norm.weight.dtype
    atomic.sweep(folder.parent)

    def finish(staging: Path) -> Path:
        """Look again at what was looked at hours ago, and write the card, which says where the head is."""
        nonlocal folder
        if refusal(config, wanted) is not None:
            folder = wanted.with_name(f"{wanted.name}-{config.run}")
        arguments = serving_arguments(config, folder, by_name=folder == wanted and drafts_by_name(staging, config))
        (staging / README).write_text(card(record, *arguments), encoding="utf-8")
        return folder

    with atomic.replace_folder(wanted, finish) as staging:
        name = target_name(config.model)
        facts = {"target_fingerprint": target.fingerprint, "target": name, "base_model": hub_id(config.model)}
        sizes = {key: getattr(head.config, key) for key in ("draft_vocab_size", "vocab_size")}
        record = portable({**provenance, **facts, **sizes})
        if HEADS[head.config.name].is_target:
            copy_beside(target, staging)

        def write(record: Mapping[str, Any]) -> None:
            save_head(
                head,
                staging,
                verifier=name,
                verifier_architecture=target.config.architecture,
                speculative_tokens=config.eval_draft_tokens,
                provenance=dict(record),
                dtype=dtype,
            )

        write(record)
        loaded = load_head(staging, name=head.config.name, dtype=dtype, device=target.norm.weight.device, target=target)
        measured = measure(loaded)
        record |= measured.record()
        write(record)
    return folder, measured


def drafts_by_name(folder: Path, config: TrainConfig) -> bool:
    """Return whether a command that names kind and target drafts with the head in `folder`, once it is exported."""
    shipped = shipped_heads(config.model.name) / config.head.name
    return not is_head(shipped) or best_measured([folder, shipped])[0] == folder


def drafting_words(head: HeadConfig, output_dir: str, folder: str) -> list[str]:
    """Return the words that draft with what was exported to `folder`."""
    if HEADS[head.name].is_target:
        return ["head=none", "proposer=draft_model", f"proposer.draft_model={folder}"]
    return head_words(head, output_dir)


def serving_arguments(config: TrainConfig, exported: Path, *, by_name: bool) -> tuple[str, str]:
    """Return the words of a serving command for the card, and text naming the placeholders to fill in, if any.

    Without `by_name` the words name the place of the head.
    """
    model = replace(config.model, path=portable_path(config.model.path) or TARGET_FOLDER, device="auto")
    path, output_dir = (place and portable_path(place) for place in (config.head.path, config.output_dir))
    folder = portable_path(str(exported)) or HEAD_FOLDER
    if (config.head.path and path is None) or output_dir is None:
        path = HEAD_FOLDER
    elif not by_name:
        path = folder
    words = drafting_words(replace(config.head, path=path), output_dir or OUTPUTS, folder)
    arguments = [*model_overrides(model), *words]
    meanings = {TARGET_FOLDER: "where the target lies", HEAD_FOLDER: "where this card lies"}
    unfilled = [f"`{place}` ({why})" for place, why in meanings.items() if any(place in word for word in arguments)]
    return shlex.join(arguments), f", with {' and '.join(unfilled)} filled in" if unfilled else ""
