"""The target of a run, in an engine, which packs its weights, or as an unpacked copy; its head and its objective.

`shapes` are those of target and head, before any weight is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from infer.config import EngineConfig, ProposerConfig
from infer.devices import resolve_dtype
from infer.engine import Engine
from infer.options.exported_heads import head_at
from infer.processes.launch import ranks_of
from models.checkpoint import fingerprint, has_weights
from models.config import ATTENTION, TargetConfig
from models.heads.base import Head
from models.heads.config import HeadConfig, HeadShape, NewHeadConfig
from models.heads.files import load_head
from models.heads.weights import dtype_of, initialize, set_vocabulary
from models.targets import check_weights, empty_target, load_target, resolve_checkpoint
from models.targets.llama import LlamaTarget
from models.targets.zero3 import Exchange
from models.tokenizer import Tokenizer
from models.vocab import build_draft_vocab
from train.config import DemoDataConfig, RowsDataConfig, TrainConfig


def open_engine(config: TrainConfig, device: torch.device, exchange: Exchange | None = None) -> Engine:
    """Open the engine with its target, in this process or over tensor parallel ranks, which `close` ends.

    With `exchange` the target's layers are sharded over the processes of the run, and each of them must open an engine.
    """
    dtype = resolve_dtype(config.model)
    path, revision = config.model.path_or_hub_id, config.model.revision
    drafts = ProposerConfig(name="head", adaptive=False, max_draft_tokens=config.eval_draft_tokens)
    with ranks_of(config.model, config.engine) as ranks:
        if ranks is not None:
            device = ranks.device
        part = ranks.part if ranks else None
        target = load_target(path, revision=revision, dtype=dtype, device=device, part=part, exchange=exchange)
        return Engine(
            target,
            tokenizer=Tokenizer.load(target.folder),
            proposer="none",
            config=pool_for(config),
            proposer_config=drafts,
            ranks=ranks,
        )


def pool_for(config: TrainConfig) -> EngineConfig:
    """Return the engine's settings, with a KV cache sized for this run's sequences unless its size is configured."""
    engine = config.engine
    if config.features.target == "sharded":
        engine = replace(engine, graphs="off")  # CUDA graphs could not wait for other processes
    if engine.max_tokens_in_cache is not None:
        return engine
    data = config.data
    assert isinstance(data, DemoDataConfig | RowsDataConfig)
    prompt = data.prompt_tokens if isinstance(data, DemoDataConfig) else data.max_prompt_tokens
    response = config.eval_max_tokens if data.provides_responses else max(data.max_new_tokens, config.eval_max_tokens)
    longest = prompt + response + config.eval_draft_tokens
    tokens = engine.max_batch * (longest + engine.page_size)
    return replace(engine, max_tokens_in_cache=tokens)


def unpacked_target(config: TrainConfig, module: torch.nn.Module, layers: Sequence[int] | None = None) -> LlamaTarget:
    """Load an unpacked copy of the target, or only `layers` of it; the engine's packed weights support neither copying
    nor gradients.
    """
    dtype, device = resolve_dtype(config.model), next(module.parameters()).device
    model = config.model
    return load_target(model.path_or_hub_id, revision=model.revision, dtype=dtype, device=device, layers=layers)


def make_head(config: HeadConfig, target: TargetConfig) -> Head:
    """Make a head of the target's sizes, without vocabulary. Raises ValueError if settings do not fit the target."""
    assert isinstance(config, NewHeadConfig)
    return config.make(target)


def give_vocabulary(head: Head, config: TrainConfig, target: LlamaTarget, counts: Tensor, tokenizer: Tokenizer) -> None:
    """Choose the draft vocabulary by how often the target generated each token, `counts` `[V]`, and initialize the head
    for it.
    """
    assert isinstance(config.head, NewHeadConfig)
    vocab_size = target.config.vocab_size
    special = {*tokenizer.special_ids, *tokenizer.eos_ids, *target.end_tokens, target.config.bos_token_id}
    forced = [token for token in special if token is not None and token < vocab_size]
    set_vocabulary(head, *build_draft_vocab(counts, head.config.draft_vocab_size, forced))
    reads = config.head.starts_from_target or head.config.reads_lm_head
    count = target.config.num_layers
    attending = [layer for layer in range(count) if target.config.mixes(layer, ATTENTION)]
    donors = (index for index in head.config.donor_layers if -len(attending) <= index < count)
    layers = [attending[index] if index < 0 else index for index in donors]
    donor = unpacked_target(config, head, layers=layers) if reads else target
    initialize(head, donor, from_target=config.head.starts_from_target, seed=config.seed)
    if config.head.start_from is not None:
        folder = head_at(config.head.start_from, config.head.revision, option="head.start_from=")
        earlier = load_head(folder, name=head.config.name, dtype=dtype_of(head), target=target)
        refuse_other_shape(folder, earlier.config, head.config)  # checked again: it may have been re-exported meanwhile
        head.load_state_dict(earlier.state_dict())


def refuse_other_shape(folder: Path, earlier: HeadShape, shape: HeadShape) -> None:
    """Raises ValueError if a run's head cannot load the weights of an earlier one."""
    if earlier != shape:
        raise ValueError(
            f"head.start_from={folder}: is a {earlier}, this run's head a {shape}; give the keys of head= that it was "
            "trained with"
        )


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
