"""Preparation of a run before its first step: target, engine, sequences, head, optimiser, features.

The order matters. The engine packs the target's weights, so it is made before any feature is computed, in new and
resumed runs alike (packed and unpacked linears differ in their last bits); a head initialised from the target's weights
takes them from an unpacked copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from infer.config import EngineConfig, ProposerConfig
from infer.config_checks import resolve_path
from infer.engine import Engine
from infer.engine.loading import resolve_dtype
from infer.options.head_config import HeadConfig, NewHeadConfig
from infer.parallel.launch import ranks_of
from models.config import TargetConfig
from models.heads import HEADS, load_head
from models.heads.base import Head, HeadShape
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.targets.zero3 import Exchange
from models.tokenizer import Tokenizer
from models.vocab import build_draft_vocab, coverage
from train.config import (
    DemoDataConfig,
    OfflineFeaturesConfig,
    OnlineFeaturesConfig,
    RowsDataConfig,
    TrainConfig,
)
from train.data.folder import Data, open_data
from train.data.sequences import Sequences, best_fit
from train.distributed.exchange import ProcessExchange
from train.distributed.parallel import log_main, stopping_together
from train.distributed.strategies import PLACEMENTS, Replicated
from train.evaluation import Evaluator
from train.features.layout import Layout
from train.features.online import FeatureSource, OnlineFeatures, make_features
from train.features.store import (
    FeatureStore,
    manifest,
    open_store,
    other_code,
    refuse_small_disk,
    store_name,
    wider_layout,
)
from train.objective_config import Medusa2ObjectiveConfig
from train.objectives.base import Objective
from train.objectives.medusa import MedusaTogether
from train.objectives.registry import OBJECTIVES
from train.publishing.target_view import AdaptedTarget, FrozenTarget, ServedTarget
from train.publishing.trackers import warn
from train.schedule import peak_rate
from train.signals import Interrupted, StopRequest


@dataclass
class Prepared:
    engine: Engine
    target: LlamaTarget
    sequences: Sequences  # cut to sequence_length
    packs: list[list[int]]  # indices of the sequences that share a row
    features: FeatureSource
    placement: Replicated  # head, objective and optimiser
    served: ServedTarget
    data_source: str
    data_hash: str
    data_counts: Mapping[str, Any]  # of rows and conversations

    @property
    def head(self) -> Head:
        return self.placement.head


def prepare_data(config: TrainConfig, accelerator: Accelerator, folder: Path, stop: StopRequest) -> tuple[Engine, Data]:
    """Return the engine with the target, and the sequences of both splits, generated or reused."""
    torch.manual_seed(config.seed)
    sharded = config.features.target == "sharded"
    exchange = ProcessExchange(accelerator, config.parallel.patience_minutes) if sharded else None
    engine = open_engine(config, accelerator.device, exchange)
    try:
        return engine, open_data(config, engine, accelerator, folder / "data", stop)
    except BaseException:
        engine.close()
        raise


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


def prepare(config: TrainConfig, accelerator: Accelerator, folder: Path, stop: StopRequest) -> Prepared:
    """Prepare a run; the caller closes its `engine`. Raises Interrupted on all processes if a stop is requested."""
    engine, data = prepare_data(config, accelerator, folder, stop)
    try:
        return prepare_training(config, accelerator, engine, data, stop)
    except BaseException:
        engine.close()
        raise


def prepare_training(
    config: TrainConfig, accelerator: Accelerator, engine: Engine, data: Data, stop: StopRequest
) -> Prepared:
    target, tokenizer = engine.target, engine.tokenizer
    assert tokenizer is not None
    head = make_head(config.head, target.config)
    uncut = data.train
    sequences = uncut.cut(config.sequence_length)
    if not len(sequences):
        raise ValueError(
            f"sequence_length={config.sequence_length}: cuts every sequence before its second generated token; raise "
            f"it (the longest sequence has {int(uncut.lengths.max())} tokens)"
        )
    give_vocabulary(head, config, target, sequences, tokenizer)
    head.to(accelerator.device)
    objective = make_objective(config, head)
    rate = peak_rate(config.optim, head.config.hidden_size)
    placement = PLACEMENTS[config.parallel.name](accelerator, objective, config.optim, rate)
    try:
        features = open_features(config, engine, head.config.aux_layers, sequences, accelerator, stop)
    except BaseException as error:
        placement.close(together=isinstance(error, Interrupted))
        raise
    served: ServedTarget
    if isinstance(objective, MedusaTogether):
        served = AdaptedTarget(config, objective, tokenizer, pool_for(config), data.held_out, stop.check)
    else:
        features_of = OnlineFeatures(target, head.config.aux_layers)
        served = FrozenTarget(config, target, Evaluator(config, engine, data.held_out, features_of, stop.check))
    counts = cut_counts(uncut, sequences)
    lost = 1 - counts["learnt"] / max(1, int(uncut.assistant.sum()))
    log_main(
        accelerator,
        f"{counts['sequences']} sequences, {counts['tokens']} tokens, {counts['learnt']} of them trained on "
        f"(sequence_length={config.sequence_length} cut {100 * lost:.1f} % off, and dropped "
        f"{counts['left_out']} sequences with no token left to train on); "
        f"the draft vocabulary of {head.config.draft_vocab_size} covers "
        f"{100 * coverage(sequences.ids[sequences.assistant], head.target_ids):.2f} % of these",
    )
    packs = [[index] for index in range(len(sequences))]
    if config.packing:
        packs = best_fit(sequences.lengths.tolist(), config.sequence_length)
        filled = int(sequences.offsets[-1]) / (len(packs) * config.sequence_length)
        log_main(
            accelerator, f"packed into {len(packs)} rows of {config.sequence_length} tokens, {100 * filled:.1f} % full"
        )
    return Prepared(
        engine=engine,
        target=target,
        sequences=sequences,
        packs=packs,
        features=features,
        placement=placement,
        served=served,
        data_source=data.source,
        data_counts={**data.counts, "learnt": counts},
        data_hash=uncut.content_hash(),
    )


def cut_counts(uncut: Sequences, cut: Sequences) -> dict[str, int]:
    """Return counts of `cut`, the training data, and of the sequences of which cutting left no token to train on."""
    sizes = {"sequences": len(cut), "tokens": int(cut.offsets[-1]), "learnt": int(cut.assistant.sum())}
    return {**sizes, "left_out": len(uncut) - len(cut)}


def open_features(
    config: TrainConfig,
    engine: Engine,
    aux_layers: Sequence[int],
    sequences: Sequences,
    accelerator: Accelerator,
    stop: StopRequest,
) -> FeatureSource:
    """Open the feature source. Raises Interrupted on every process if a stop is requested meanwhile."""
    settings, target, show = config.features, engine.target, accelerator.is_main_process
    assert engine.tokenizer is not None
    weights = config.engine.weight_format
    place = resolve_path(config.output_dir) / "features" / config.model.name
    if isinstance(settings, OnlineFeaturesConfig):
        record = manifest(target, engine.tokenizer, sequences, Layout.of(target, aux_layers), 0, weights)
        of_batches = {"batch_size": config.batch_size, "room": config.room, "process": accelerator.process_index}
        with stopping_together(accelerator, target.join_gathers):
            return make_features(
                settings,
                target,
                aux_layers,
                sequences,
                batch_size=config.batch_size,
                room=config.room,
                show=show,
                check=stop.check,
                kept=place / f"interrupted-{store_name(record | of_batches)}.safetensors",
            )
    assert isinstance(settings, OfflineFeaturesConfig)
    layout = Layout.of(target, aux_layers, settings)
    record = manifest(target, engine.tokenizer, sequences, layout, settings.shard_mb, weights)
    folder = resolve_path(settings.path) if settings.path else place / store_name(record)
    others = [] if settings.path or folder.is_dir() else sorted(place.glob("*/"))
    for other in (folder, *others):  # a store with more layers can be used too
        if wider := wider_layout(layout, record, other):
            folder, layout, record = other, wider, {**record, "layers": list(wider.layers)}
            break
    store = FeatureStore(folder, target, aux_layers, sequences, layout, settings.shard_mb)
    refuse_small_disk(folder, store.missing_bytes)
    kept = f"; {done} of {store.shards} shards are there" if (done := store.shards - len(store.missing)) else ""
    log_main(accelerator, f"features in {folder}: {store.missing_bytes / 1e9:.2f} GB to be computed{kept}")
    if accelerator.is_main_process:
        made_by = open_store(folder, record)
        log_main(
            accelerator, f"the store was written by Headway {made_by.get('version')}, commit {made_by.get('commit')}"
        )
        if note := other_code(made_by):
            warn(note)
    accelerator.wait_for_everyone()
    with stopping_together(accelerator, target.join_gathers):
        share = (accelerator.process_index, accelerator.num_processes)
        store.fill(config.batch_size, share, stop.check, room=config.room, show=show)
    return store


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


def make_head(config: HeadConfig, target: TargetConfig) -> Head:
    """Make a head of the target's sizes, without vocabulary. Raises ValueError if settings do not fit the target."""
    kind, common = HEADS[config.name], {field.name for field in fields(NewHeadConfig)}
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in common}
    return kind(kind.config_class.for_target(target, **options))


def make_objective(config: TrainConfig, head: Head) -> Objective:
    """Make the objective of a head with its vocabulary. Raises ValueError for `lora_on` layers the target lacks."""
    if isinstance(config.objective, Medusa2ObjectiveConfig):
        return MedusaTogether(head, config.objective, unpacked_target(config, head), config.seed)
    return OBJECTIVES[config.objective.name](head, config.objective)


def unpacked_target(config: TrainConfig, module: torch.nn.Module, layers: Sequence[int] | None = None) -> LlamaTarget:
    """Load an unpacked copy of the target, or only `layers` of it; the engine's packed weights support neither copying
    nor gradients.
    """
    dtype, device = resolve_dtype(config.model), next(module.parameters()).device
    model = config.model
    return load_target(model.path_or_hub_id, revision=model.revision, dtype=dtype, device=device, layers=layers)


def give_vocabulary(
    head: Head, config: TrainConfig, target: LlamaTarget, sequences: Sequences, tokenizer: Tokenizer
) -> None:
    """Choose the draft vocabulary from the target's generated tokens and initialise the head for it."""
    assert isinstance(config.head, NewHeadConfig)
    vocab_size = target.config.vocab_size
    special = {*tokenizer.special_ids, *tokenizer.eos_ids, *target.end_tokens, target.config.bos_token_id}
    forced = [token for token in special if token is not None and token < vocab_size]
    head.set_vocabulary(*build_draft_vocab(sequences.counts(vocab_size), head.config.draft_vocab_size, forced))
    reads = config.head.init_from_target or head.reads_lm_head
    donor = unpacked_target(config, head, layers=[-1]) if reads else target
    head.initialise(donor, from_target=config.head.init_from_target, seed=config.seed)
    if config.head.start_from is not None:
        go_on_from(head, resolve_path(config.head.start_from), target)


def refuse_other_shape(folder: Path, earlier: HeadShape, shape: HeadShape) -> None:
    """Raises ValueError if a run's head cannot load the weights of an earlier one."""
    if earlier != shape:
        raise ValueError(
            f"head.start_from={folder}: is a {earlier}, this run's head a {shape}; give the keys of head= that it was "
            "trained with"
        )


def go_on_from(head: Head, folder: Path, target: LlamaTarget) -> None:
    """Load the weights and the draft vocabulary of an exported head of the same shape."""
    earlier = load_head(folder, name=head.name, dtype=head.dtype, target=target)
    refuse_other_shape(folder, earlier.config, head.config)  # checked again: it may have been re-exported meanwhile
    head.load_state_dict(earlier.state_dict())
