"""The end of a run: exports its last state or its best one, measured as it was published, and draws its plots.

`verdict` says when an acceptance length means nothing, why, and what would give more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.console.command_words import model_overrides, portable_path, python_command
from train import checkpoint
from train.config import TrainConfig
from train.evaluation import acceptance_metrics
from train.preparation.prepare import Prepared
from train.publishing.export import drafting_words, drafts_by_name, export_head
from train.publishing.plots import draw_plots
from train.publishing.trackers import Trackers
from train.storage.provenance import provenance
from train.storage.run_folder import refusal


def publish_run(
    config: TrainConfig,
    folder: Path,
    prepared: Prepared,
    tracker: Trackers,
    progress: Mapping[str, Any],
    best: float,
    judge: Callable[[float], str | None],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Export the head and draw the plots; return the summary. For one process.

    `progress`: steps, tokens and seconds of the run; `best`: its highest acceptance length in the engine. `judge`
    returns a line for an acceptance length that means nothing.
    """
    record = record_of(config, prepared, progress)
    parts, measure = (prepared.head, prepared.target, config), prepared.evaluator.measure_fully
    head_folder, measured = export_head(*parts, record, measure)
    metrics = prepared.evaluator.losses(prepared.placement.measured)
    tracker.log(record["steps"], metrics | acceptance_metrics(measured.greedy))
    if config.export == "best" and best > measured.greedy.engine.acceptance_length:
        state = load_best(folder, prepared)
        log(f"exporting the head of step {state['step']}, τ {best:.3f} in the engine: the last is worse")
        exact = {"steps": state["step"], "tokens": state["tokens"], "seconds": round(state["seconds"], 1)}
        record = {**record, **exact}
        head_folder, measured = export_head(*parts, record, measure)
    plots = draw_plots(folder, measured)
    tracker.publish(plots, head_folder, ("latest", f"step_{record['steps']}"))
    lengths = measured.greedy.summary()
    positions = " ".join(f"{share:.2f}" for share in measured.greedy.engine.acceptance_by_position)
    log(f"acceptance length τ {lengths['engine']:.3f} in the engine (by position {positions})")
    note = judge(lengths["engine"])
    if note is not None:
        log(note)
    log(f"exported to {head_folder}; metrics and plots in {folder}")
    place, refused = portable_path(str(head_folder)) or str(head_folder), head_folder != config.export_folder
    head = config.head
    if refused or not drafts_by_name(head_folder, config):
        head = dataclasses.replace(head, path=place)
    arguments = [*model_overrides(config.model), *drafting_words(head, config.output_dir, place)]
    log(f"serve it: {python_command('infer/serve.py', *arguments)}")
    if refused:
        raise ValueError(
            f"{refusal(config, config.export_folder)}, and did not yet when this run began. This run's head is in "
            f"{head_folder}; overwrite=true run={config.run} puts it in that place"
        )
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
        trained_parameters=sum(p.numel() for p in checkpoint.trainable(placement.head).values()),
        seconds=round(progress["seconds"], 1),
        data_source=prepared.data_source,
        data_hash=prepared.data_hash,
        data_counts=prepared.data_counts,
        trained_depth=config.trained_depth,
    )


def load_best(folder: Path, prepared: Prepared) -> Mapping[str, Any]:
    """Load the parameters with the highest acceptance length, to be exported; return the state of their checkpoint."""
    path = checkpoint.find_checkpoint(folder / "checkpoints", checkpoint.BEST)
    assert path is not None, "the best state was saved when it was found"
    module = prepared.placement.head
    loaded = checkpoint.load_checkpoint(path, checkpoint.module_tensors(module))
    checkpoint.load_module(module, loaded.trained.module)
    return loaded.state


USEFUL = 1.25  # τ below which fewer than a quarter of the verifies accept a drafted token: drafting cannot pay
ENOUGH = 200  # updates after which the demo's eagle3 has τ 1.5


def verdict(
    tau: float, updates: int, *, tokens: int, seconds: float, other_seconds: float, minutes: float | None
) -> str | None:
    """Return the line for a head of acceptance length `tau` after `updates`, None if it is useful.

    The updates took `seconds` for `tokens`, all else `other_seconds`. `minutes`: the budget, if that ended the run.
    """
    if tau >= USEFUL:
        return None
    made = f"τ {tau:.2f} after {counted(updates, 'update')}"
    if updates >= ENOUGH:
        return f"{made}: this head drafts hardly anything; train on more data, longer, or with another optim.lr"
    needed = other_seconds + ENOUGH * seconds / max(updates, 1)
    more = f"steps={ENOUGH} would take about {counted(math.ceil(needed / 60), 'minute')}"
    if minutes is not None:
        more = f"minutes={math.ceil(max(needed / 60, minutes + 1))} would make about {ENOUGH} updates"
    return f"{made} means nothing yet: this machine made {tokens / max(seconds, 1e-9):,.0f} tokens/s; {more}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
