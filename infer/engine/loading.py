"""Loads the parts of an engine (target, tokenizer, head, draft model) from the configs of an entry point."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.devices import resolve_device, resolve_dtype, use_device
from infer.options.exported_heads import choose_head, head_folder, is_head, resolve_tree
from infer.options.model_names import read_head_config, read_model, read_option
from infer.options.stored_weights import reads_native
from infer.processes.comm import Ranks
from infer.speculation.proposers.draft_model import draft_folder, load_draft_model
from models.heads.base import Head
from models.heads.config import HeadConfig
from models.heads.draft_model.head import DraftModelHead
from models.heads.files import check_exported, load_head
from models.heads.measured_tree import rank_accuracy
from models.targets import load_target, resolve_checkpoint
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Loaded(NamedTuple):
    target: LlamaTarget
    tokenizer: Tokenizer
    head: Head | None
    draft_model: DraftModelHead | None
    proposer: ProposerConfig  # as configured, with a measured tree resolved to its nodes
    priors: dict[str, list[float]]  # by proposer: acceptance by depth, if training measured it


def read_names(
    model: ModelConfig | str, head: HeadConfig | str | None, proposer: ProposerConfig | str, output_dir: str
) -> tuple[ModelConfig, HeadConfig | None, ProposerConfig]:
    """Resolve names to configs. Raises ValueError for a name that does not exist."""
    model = read_model(model) if isinstance(model, str) else model
    proposer = ProposerConfig(**read_option("proposer", proposer)) if isinstance(proposer, str) else proposer
    head = read_head_config(head) if isinstance(head, str) else head
    return model, head and choose_head(head, output_dir, model), proposer


def load_parts(
    model: ModelConfig,
    head: HeadConfig | None,
    proposer: ProposerConfig,
    *,
    output_dir: str,
    engine: EngineConfig | None = None,
    ranks: Ranks | None = None,
) -> Loaded:
    """Load the parts of an engine. Raises ValueError for a missing device and for checkpoints that do not fit together.

    With `proposer=auto` a head that was never exported is no error: another proposer drafts. With `ranks` the target is
    rank 0's shard. `engine` decides in which form weights are served.
    """
    device, dtype = ranks.device if ranks else resolve_device(model.device), resolve_dtype(model)
    use_device(device)
    part = ranks.part if ranks else None
    folder = wanted_head(model, head, proposer, output_dir)
    if folder is not None:
        check_exported(folder)
    if proposer.draft_model is not None:
        draft_folder(proposer, weights=False)
    path, divided = model.path_or_hub_id, part is not None
    native = reads_native(model, engine or EngineConfig(), dtype, device, divided=divided)
    # in a second thread, since packing does not hold the GIL
    tokenizer = ThreadPoolExecutor(1).submit(Tokenizer.load, resolve_checkpoint(path, model.revision))
    context = None if engine is None else engine.max_model_len
    where = {"revision": model.revision, "dtype": dtype, "device": device}
    target = load_target(path, **where, part=part, native=native, context=context)
    loaded_head, priors, loaded_draft = None, dict[str, list[float]](), None
    if head is not None and folder is not None:
        loaded_head = load_head(
            folder, name=head.name, dtype=dtype, device=device, target=target, allow_mismatch=head.allow_mismatch
        )
        proposer = resolve_tree(proposer, folder)
        priors = {"head": [shares[0] for shares in rank_accuracy(folder) or []]}
    if proposer.draft_model is not None:
        loaded_draft = load_draft_model(proposer, target, tokenizer.result(), engine or EngineConfig())
    loaded = Loaded(target, tokenizer.result(), loaded_head, loaded_draft, proposer, priors)
    if opened := sys.modules.get("models.gguf.file"):
        opened.forget_files()
    return loaded


def wanted_head(model: ModelConfig, head: HeadConfig | None, proposer: ProposerConfig, output_dir: str) -> Path | None:
    """Return the folder of the head to load, if any; with `proposer=auto` a head that has a path or was exported."""
    required = proposer.name == "head" or (proposer.merges and "head" in proposer.sources)
    if head is None or head.name == "none" or not (required or proposer.name == "auto"):
        return None
    folder = head_folder(head, output_dir, model)
    return folder if required or head.path or is_head(folder) else None
