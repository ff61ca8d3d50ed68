"""Preparation of a run before its first step: target, engine, sequences, head, optimiser, features.

The order matters. The engine packs the target's weights, so it is made before any feature is computed, in new and
resumed runs alike (packed and unpacked linears differ in their last bits); a head initialized from the target's weights
takes them from an unpacked copy.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from infer.engine import Engine
from infer.settings.paths import resolve_path
from models.heads.base import Head
from models.heads.config import NewHeadConfig
from models.targets.llama import LlamaTarget
from models.vocab import coverage
from train.config import DemoDataConfig, OfflineFeaturesConfig, OnlineFeaturesConfig, TrainConfig
from train.data.folder import Data
from train.data.sequences import Sequences, best_fit
from train.distributed.collectives import ProcessExchange, log_main, stopping_together
from train.distributed.strategies import PLACEMENTS, Replicated
from train.evaluation import Evaluator
from train.features.layout import Layout
from train.features.online import FeatureSource, fits_cache, online_features
from train.features.recorded import FeatureRecorder, RecordedFeatures
from train.features.store import (
    CachedFeatures,
    FeatureStore,
    manifest,
    open_store,
    origin,
    refuse_small_disk,
    wider_layout,
)
from train.objectives.registry import OBJECTIVES
from train.preparation.models import give_vocabulary, make_head, open_engine
from train.schedule import peak_rate
from train.signals import StopRequest
from train.storage.run_folder import recipe
from train.threads import work_threads


@dataclass
class Prepared:
    target: LlamaTarget
    sequences: Sequences  # cut to sequence_length
    packs: list[list[int]]  # indices of the sequences that share a row
    placement: Replicated  # head, objective and optimiser
    evaluator: Evaluator
    data_source: str
    data_hash: str
    data_counts: dict[str, Any]  # of rows and conversations
    lines: list[str]  # which say what the sequences are
    features: FeatureSource | None = None  # of a run with steps left: `open_features`

    @property
    def head(self) -> Head:
        return self.placement.head

    def open_features(self, config: TrainConfig, engine: Engine, stop: StopRequest) -> None:
        """Compute the features. Raises Interrupted on every process if a stop is requested meanwhile."""
        layers, accelerator, target = self.head.config.aux_layers, self.placement.accelerator, engine.target
        settings, rank, world = config.features, accelerator.process_index, accelerator.num_processes
        online = isinstance(settings, OnlineFeaturesConfig)
        if online and not fits_cache(settings, target, layers, int(self.sequences.offsets[-1])):
            self.features = online_features(target, layers)
            return
        assert engine.tokenizer is not None
        stored = settings if isinstance(settings, OfflineFeaturesConfig) else None
        layout = Layout.for_head(target, self.head.config, stored)
        record = manifest(target, engine.tokenizer, self.sequences, layout, config.engine.weight_format)
        store: FeatureStore
        recorded = None
        if online:
            of_batches = {"batch_size": config.batch_size, "room": config.room, "process": rank}
            folder = features_place(config) / f"interrupted-{recipe(record | of_batches)}"
            store, rank, world = CachedFeatures(folder, target, layers, self.sequences, layout), 0, 1
        else:
            store, recorded = self._open_store(config, engine, layout, record)
        threads, show = work_threads(config, accelerator.device, accelerator.num_processes), accelerator.is_main_process
        options: dict[str, Any] = {"room": config.room, "show": show, "threads": threads}
        with stopping_together(accelerator, target.join_gathers):
            store.fill(config.batch_size, (rank, world), stop.check, recorded=recorded, **options)
        accelerator.wait_for_everyone()
        if recorded is not None and accelerator.is_main_process:
            recorded.stored((self.sequences.row(index)[0] for index in range(len(self.sequences))), last=True)
        self.features = store

    def _open_store(
        self, config: TrainConfig, engine: Engine, layout: Layout, record: dict[str, Any]
    ) -> tuple[FeatureStore, RecordedFeatures]:
        """Open the store at features.path, else the one of these features, or another of the target with more layers.

        Returns also what the engine has recorded of them.
        """
        accelerator, place = self.placement.accelerator, features_place(config)
        path = getattr(config.features, "path", None)
        folder = resolve_path(path) if path else place / recipe(record)
        others = [] if path or folder.is_dir() else sorted(place.glob("*/"))
        for other in (folder, *others):
            if wider := wider_layout(layout, record, other):
                folder, layout, record = other, wider, wider.described(record)
                break
        store = FeatureStore(folder, self.target, self.head.config.aux_layers, self.sequences, layout)
        recorded = RecordedFeatures(recorded_folder(config, engine, layout))
        alone = accelerator.num_processes == 1  # each part is deleted once the store has what it holds
        refuse_small_disk(folder, max(0, store.missing_bytes - (recorded.num_bytes if alone else 0)))
        done = store.shards - len(store.missing)
        kept = f"; {done} of {store.shards} shards are there" if done else ""
        if store.missing and len(recorded):
            kept += f"; those of {len(recorded)} sequences were taken while they were generated"
        log_main(accelerator, f"features in {folder}: {store.missing_bytes / 1e9:.2f} GB to be stored{kept}")
        if accelerator.is_main_process:
            open_store(folder, record)
        accelerator.wait_for_everyone()
        return store, recorded


def features_place(config: TrainConfig) -> Path:
    return resolve_path(config.output_dir) / "features" / config.model.name


def recorded_folder(config: TrainConfig, engine: Engine, layout: Layout) -> Path:
    """Return where features of this layout lie until a store takes them: any run of the target may use them."""
    path = getattr(config.features, "path", None)
    place = resolve_path(path).parent if path else features_place(config)
    assert engine.tokenizer is not None
    return place / f"recorded-{recipe(origin(engine.target, engine.tokenizer, layout, config.engine.weight_format))}"


def feature_recorder(config: TrainConfig, engine: Engine) -> FeatureRecorder | None:
    """Return what takes features while the engine answers; None if it does not, or stores none, or uses CUDA graphs."""
    settings, data = config.features, config.data
    if not isinstance(settings, OfflineFeaturesConfig) or not settings.record or engine.graphs is not None:
        return None
    if data.provides_responses or data.server is not None:
        return None
    assert isinstance(config.head, NewHeadConfig)
    layout = Layout.for_head(engine.target, config.head.for_target(engine.target.config), settings)
    return FeatureRecorder(layout, recorded_folder(config, engine, layout), config.sequence_length)


def start_engine(config: TrainConfig, accelerator: Accelerator, resources: ExitStack) -> Engine:
    """Return the engine with the target, which `resources` closes. Seeds torch."""
    torch.manual_seed(config.seed)
    sharded = config.features.target == "sharded"
    exchange = ProcessExchange(accelerator) if sharded else None
    engine = open_engine(config, accelerator.device, exchange)
    resources.callback(engine.close)
    return engine


def trial_data(config: TrainConfig, context: int) -> Data:
    """Return two made-up sequences: a short one, and one as long as the data allow."""
    data, longest = config.data, min(config.sequence_length, context)
    if isinstance(data, DemoDataConfig) and not config.packing:
        longest = min(longest, data.prompt_tokens + data.max_new_tokens)
    sequences = Sequences.of([([1] * length, [True] * length) for length in (min(16, longest), longest)])
    return Data(sequences, sequences, "", {})


def prepare(
    config: TrainConfig, accelerator: Accelerator, engine: Engine, data: Data, stop: StopRequest, resources: ExitStack
) -> Prepared:
    """Prepare a run without its features; `resources` closes what it opens."""
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
    give_vocabulary(head, config, target, sequences.counts(target.config.vocab_size), tokenizer)
    head.to(accelerator.device)
    objective = OBJECTIVES[config.objective.name](head, config.objective)
    rate = peak_rate(config.optim, head.config.hidden_size)
    placement = PLACEMENTS[config.parallel.name](accelerator, objective, config.optim, rate)
    # an error, of which other processes need not know, leaves the block of `resources`; an end or a stop is of all
    resources.push(lambda error, *_: placement.close(together=error is None))
    features_of = online_features(target, head.config.aux_layers)
    counts = {
        "sequences": len(sequences),
        "tokens": int(sequences.offsets[-1]),
        "learnt": int(sequences.assistant.sum()),
        "left_out": len(uncut) - len(sequences),  # of which cutting left no token to train on
    }
    lost = 1 - counts["learnt"] / max(1, int(uncut.assistant.sum()))
    lines = [
        f"{counts['sequences']} sequences, {counts['tokens']} tokens, {counts['learnt']} of them trained on "
        f"(sequence_length={config.sequence_length} cut {100 * lost:.1f} % off, and dropped "
        f"{counts['left_out']} sequences with no token left to train on); "
        f"the draft vocabulary of {head.config.draft_vocab_size} covers "
        f"{100 * coverage(sequences.ids[sequences.assistant], head.target_ids):.2f} % of these",
    ]
    packs = [[index] for index in range(len(sequences))]
    if config.packing:
        packs = best_fit(sequences.lengths.tolist(), config.sequence_length)
        filled = int(sequences.offsets[-1]) / (len(packs) * config.sequence_length)
        lines.append(f"packed into {len(packs)} rows of {config.sequence_length} tokens, {100 * filled:.1f} % full")
    return Prepared(
        target=target,
        sequences=sequences,
        packs=packs,
        placement=placement,
        evaluator=Evaluator(config, engine, data.held_out, features_of, stop.check),
        data_source=data.source,
        data_counts={**data.counts, "learnt": counts},
        data_hash=uncut.content_hash(),
        lines=lines,
    )
