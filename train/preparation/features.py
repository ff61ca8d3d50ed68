"""Opens the source of features of a run, after they have been computed as far as they are kept."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from infer.engine import Engine
from infer.options.paths import resolve_path
from train.config import OfflineFeaturesConfig, OnlineFeaturesConfig, TrainConfig
from train.data.sequences import Sequences
from train.distributed.collectives import log_main, stopping_together
from train.features.layout import Layout
from train.features.online import FeatureSource, fits_cache, online_features
from train.features.store import (
    CachedFeatures,
    FeatureStore,
    manifest,
    open_store,
    other_code,
    refuse_small_disk,
    store_name,
    wider_layout,
)
from train.preparation.threads import work_threads
from train.publishing.trackers import warn
from train.signals import StopRequest


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
    weights, threads = config.engine.weight_format, work_threads(config, accelerator.device, accelerator.num_processes)
    place = resolve_path(config.output_dir) / "features" / config.model.name
    if isinstance(settings, OnlineFeaturesConfig):
        if not fits_cache(settings, target, aux_layers, int(sequences.offsets[-1])):
            return online_features(target, aux_layers)
        layout = Layout.of(target, aux_layers)
        record = manifest(target, engine.tokenizer, sequences, layout, weights)
        of_batches = {"batch_size": config.batch_size, "room": config.room, "process": accelerator.process_index}
        folder = place / f"interrupted-{store_name(record | of_batches)}"
        cache = CachedFeatures(folder, target, aux_layers, sequences, layout)
        with stopping_together(accelerator, target.join_gathers):
            cache.fill(config.batch_size, (0, 1), stop.check, room=config.room, show=show, threads=threads)
        return cache
    assert isinstance(settings, OfflineFeaturesConfig)
    layout = Layout.of(target, aux_layers, settings)
    record = manifest(target, engine.tokenizer, sequences, layout, weights)
    folder = resolve_path(settings.path) if settings.path else place / store_name(record)
    others = [] if settings.path or folder.is_dir() else sorted(place.glob("*/"))
    for other in (folder, *others):  # a store with more layers can be used too
        if wider := wider_layout(layout, record, other):
            folder, layout, record = other, wider, {**record, "layers": list(wider.layers)}
            break
    store = FeatureStore(folder, target, aux_layers, sequences, layout)
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
        store.fill(config.batch_size, share, stop.check, room=config.room, show=show, threads=threads)
    return store
