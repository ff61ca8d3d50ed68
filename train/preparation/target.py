"""Loads the target of a run: in an engine, which packs its weights, or as an unpacked copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.options.devices import resolve_dtype
from infer.processes.launch import ranks_of
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.targets.zero3 import Exchange
from models.tokenizer import Tokenizer
from train.config import DemoDataConfig, RowsDataConfig, TrainConfig


def open_engine(config: TrainConfig, device: torch.device, exchange: Exchange | None = None) -> Engine:
    """Open the engine with its target, in this process or over tensor parallel ranks, which `close` ends.

    With `exchange` the target's layers are sharded over the processes of the run, and each of them must open an engine.
    """
    dtype = resolve_dtype(config.model)
    path, revision = config.model.path_or_hub_id, config.model.revision
    drafts = ProposerConfig(name="head", max_draft_tokens=config.eval_draft_tokens)
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
