"""The end of a run: exports its last state or its best one, measured as it was published, and reports on the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.console.command_words import model_overrides, portable_path, python_command
from train import checkpoint
from train.config import TrainConfig
from train.evaluation import acceptance_metrics
from train.planning.plan import measure
from train.planning.precision import compute_dtype
from train.preparation.prepare import Prepared
from train.publishing.export import Measured, drafting_words, export_head
from train.publishing.plots import draw_plots
from train.publishing.provenance import provenance
from train.publishing.report import write_report
from train.publishing.samples import how_many
from train.publishing.target_view import ServedTarget
from train.publishing.trackers import Results, Tracker


def publish_run(
    config: TrainConfig,
    folder: Path,
    prepared: Prepared,
    tracker: Tracker,
    progress: Mapping[str, Any],
    best: float,
    judge: Callable[[float], str | None],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Export the head and write plots and report; return the summary. For one process.

    `progress`: steps, tokens and seconds of the run; `best`: its highest acceptance length in the engine. `judge`
    returns a line for an acceptance length that means nothing.
    """
    record = record_of(config, prepared, progress)
    target, head_folder, measured = export(prepared, record)
    metrics = target.measure.losses(prepared.placement.measured)
    tracker.log(record["steps"], metrics | acceptance_metrics(measured.greedy))
    if config.export == "best" and best > measured.greedy.engine.acceptance_length:
        state = load_best(folder, prepared)
        log(f"exporting the head of step {state['step']}, τ {best:.3f} in the engine: the last is worse")
        exact = {"steps": state["step"], "tokens": state["tokens"], "seconds": round(state["seconds"], 1)}
        record = {**record, **exact}
        target, head_folder, measured = export(prepared, record)
    samples = target.measure.samples(prepared.head, how_many(config.tracker))
    speeds = dict[int, float]()
    if config.eval_concurrency:
        speeds = target.measure.speeds(prepared.head, config.eval_concurrency)
        ratios = {f"eval/speed_ratio_{count}": ratio for count, ratio in speeds.items()}
        tracker.log(progress["steps"], ratios)
    plots = draw_plots(folder, measured, speeds)
    results = Results(plots, samples, head_folder, ("latest", f"step_{record['steps']}"))
    report = write_report(folder, config, record, measured, results)
    tracker.publish(results)
    lengths = measured.greedy.summary()
    positions = " ".join(f"{share:.2f}" for share in measured.greedy.engine.acceptance_by_position)
    log(f"acceptance length τ {lengths['engine']:.3f} in the engine (by position {positions})")
    note = judge(lengths["engine"])
    if note is not None:
        log(note)
    log(f"exported to {head_folder}; report in {report}")
    place = portable_path(str(head_folder)) or str(head_folder)
    arguments = [*model_overrides(target.config.model), *drafting_words(config.head, config.output_dir, place)]
    log(f"serve it: {python_command('infer/serve.py', *arguments)}")
    summary = {"export": str(head_folder), "acceptance_length": lengths, "gap": round(measured.greedy.gap, 4)}
    return summary if note is None else {**summary, "note": note}


def record_of(config: TrainConfig, prepared: Prepared, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of the run's head."""
    placement = prepared.placement
    return provenance(
        dataclasses.asdict(config),
        run=config.run,
        steps=progress["steps"],
        tokens=progress["tokens"],
        trained_parameters=sum(p.numel() for p in checkpoint.trainable(placement.trained).values()),
        seconds=round(progress["seconds"], 1),
        data_source=prepared.data_source,
        data_hash=prepared.data_hash,
        data_counts=prepared.data_counts,
        peak_flops=measure(placement.accelerator.device, compute_dtype(config)).flops,
    )


def export(prepared: Prepared, record: Mapping[str, Any]) -> tuple[ServedTarget, Path, Measured]:
    """Publish target and head. Returns the target, the head's folder, and what was measured of its files."""
    target = prepared.served.publish()
    measure = target.measure.measure_fully
    return target, *export_head(prepared.head, target.target, target.config, record, measure, note=target.note)


def load_best(folder: Path, prepared: Prepared) -> Mapping[str, Any]:
    """Load the parameters with the highest acceptance length, to be exported; return the state of their checkpoint."""
    path = checkpoint.best_checkpoint(folder / "checkpoints")
    assert path is not None, "the best state was saved when it was found"
    module = prepared.placement.trained
    loaded = checkpoint.load_checkpoint(path, checkpoint.module_tensors(module))
    checkpoint.load_module(module, loaded.trained.module)
    return loaded.state
