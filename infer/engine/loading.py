"""From the configs of an entry point to what an engine is made of: target, tokenizer, head, draft model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from infer.config import ModelConfig, ProposerConfig
from infer.options.exported_heads import choose_head, head_folder, is_head, read_head_config
from infer.options.head_config import HeadConfig
from infer.options.model_names import read_model, read_option
from infer.parallel.comm import Ranks
from infer.speculation.measured_tree import rank_accuracy, resolve_tree
from models.heads import check_exported, load_head
from models.heads.base import Head
from models.targets import load_target, resolve_checkpoint
from models.targets.dtype import stated_dtype
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Parts(NamedTuple):
    target: LlamaTarget
    tokenizer: Tokenizer
    head: Head | None
    draft_model: LlamaTarget | None
    proposer: ProposerConfig  # as it was given, a measured tree written out
    priors: dict[str, list[float]]  # by proposer: how often its training saw each depth accepted, if it did


def read_names(
    model: ModelConfig | str, head: HeadConfig | str | None, proposer: ProposerConfig | str, output_dir: str
) -> tuple[ModelConfig, HeadConfig | None, ProposerConfig]:
    """The configs that names stand for. Raises ValueError for one that names nothing."""
    model = read_model(model) if isinstance(model, str) else model
    proposer = ProposerConfig(**read_option("proposer", proposer)) if isinstance(proposer, str) else proposer
    head = read_head_config(head) if isinstance(head, str) else head
    return model, head and choose_head(head, output_dir, model.name), proposer


def load_parts(
    model: ModelConfig,
    head: HeadConfig | None,
    proposer: ProposerConfig,
    *,
    output_dir: str,
    ranks: Ranks | None = None,
) -> Parts:
    """Raises ValueError for a device that is not there and for checkpoints that do not fit each other.

    With `proposer=auto` a head that was never exported is no error: something else drafts. With `ranks` the target is
    rank 0's part of it.
    """
    device, dtype = ranks.device if ranks else resolve_device(model.device), resolve_dtype(model)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the thread's device, wherever the tensors lie
    part = ranks.part if ranks else None
    folder = wanted_head(model, head, proposer, output_dir)
    if folder is not None:
        check_exported(folder)
    drafter = None
    if proposer.draft_model is not None:
        drafter = ModelConfig(name="draft", path=proposer.draft_model, revision=proposer.draft_model_revision)
        resolve_checkpoint(drafter.path_or_hub_id, drafter.revision, weights=False)
    target = load_target(model.path_or_hub_id, revision=model.revision, dtype=dtype, device=device, part=part)
    tokenizer = Tokenizer.load(target.folder)
    loaded, priors, smaller = None, dict[str, list[float]](), None
    if head is not None and folder is not None:
        loaded = load_head(
            folder, name=head.name, dtype=dtype, device=device, target=target, allow_mismatch=head.allow_mismatch
        )
        proposer = resolve_tree(proposer, folder)
        priors = {"head": [shares[0] for shares in rank_accuracy(folder) or []]}
    if drafter is not None:
        assert proposer.draft_model is not None
        smaller = load_target(drafter.path_or_hub_id, revision=drafter.revision, dtype=dtype, device=device)
        check_same_tokenizer(tokenizer, Tokenizer.load(smaller.folder), proposer.draft_model)
    return Parts(target, tokenizer, loaded, smaller, proposer, priors)


def wanted_head(model: ModelConfig, head: HeadConfig | None, proposer: ProposerConfig, output_dir: str) -> Path | None:
    """Of the head that is to be loaded, if any: with `proposer=auto` one that was named, or that is there."""
    wanted = proposer.name == "head" or (proposer.name == "combined" and "head" in proposer.sources)
    if head is None or head.name == "none" or not (wanted or proposer.name == "auto"):
        return None
    folder = head_folder(head, output_dir, model.name)
    return folder if wanted or head.path or is_head(folder) else None


def resolve_dtype(model: ModelConfig) -> torch.dtype:
    """`model.dtype`, of `auto` what the checkpoint says. Raises ValueError where that cannot be computed in."""
    if model.dtype != "auto":
        return getattr(torch, model.dtype)
    return stated_dtype(resolve_checkpoint(model.path_or_hub_id, model.revision, weights=False))


def dtype_name(model: ModelConfig) -> str:
    return str(resolve_dtype(model)).removeprefix("torch.")


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={name}: this machine has no usable GPU; model.device=cpu runs without")
    return torch.device(name)


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ValueError if the two would read a token id differently."""
    mine, theirs = target.backend.get_vocab(), draft.backend.get_vocab()
    if mine != theirs:
        word, index = min(mine.items() ^ theirs.items())
        raise ValueError(
            f"proposer.draft_model={path}: must share the target's tokenizer; they differ at id {index}, {word!r}"
        )
