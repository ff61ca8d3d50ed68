"""The end of a run: exports its last state or its best one, measured as it was published, and reports on the run.

The report, report.md in the run's folder, has data, acceptance, training curve, timings, sample texts and settings.
`verdict` says when an acceptance length means nothing, why, and what would give more.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.console.command_words import model_overrides, portable_path, python_command
from train import checkpoint
from train.config import TrainConfig
from train.data.folder import NAMED, SOURCE
from train.data.prompts import first_of
from train.evaluation import acceptance_metrics, how_many
from train.planning.plan import measure
from train.planning.precision import compute_dtype
from train.preparation.prepare import Prepared
from train.publishing.card import data_lines, table
from train.publishing.export import Acceptance, Measured, drafting_words, export_head, stated, tau
from train.publishing.plots import draw_plots
from train.publishing.provenance import provenance
from train.publishing.trackers import Results, Sample, Trackers, read_metrics
from train.step_clock import PARTS
from train.storage import atomic
from train.storage.run_folder import flatten, read_record


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
    """Export the head and write plots and report; return the summary. For one process.

    `progress`: steps, tokens and seconds of the run; `best`: its highest acceptance length in the engine. `judge`
    returns a line for an acceptance length that means nothing.
    """
    record = record_of(config, prepared, progress)
    head_folder, measured = export(config, prepared, record)
    metrics = prepared.evaluator.losses(prepared.placement.measured)
    tracker.log(record["steps"], metrics | acceptance_metrics(measured.greedy))
    if config.export == "best" and best > measured.greedy.engine.acceptance_length:
        state = load_best(folder, prepared)
        log(f"exporting the head of step {state['step']}, τ {best:.3f} in the engine: the last is worse")
        exact = {"steps": state["step"], "tokens": state["tokens"], "seconds": round(state["seconds"], 1)}
        record = {**record, **exact}
        head_folder, measured = export(config, prepared, record)
    samples = prepared.evaluator.samples(prepared.head, how_many(config.tracker))
    speeds = dict[int, float]()
    if config.eval_concurrency:
        speeds = prepared.evaluator.speeds(prepared.head, config.eval_concurrency)
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
    arguments = [*model_overrides(config.model), *drafting_words(config.head, config.output_dir, place)]
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
        trained_parameters=sum(p.numel() for p in checkpoint.trainable(placement.head).values()),
        seconds=round(progress["seconds"], 1),
        data_source=prepared.data_source,
        data_hash=prepared.data_hash,
        data_counts=prepared.data_counts,
        trained_depth=config.trained_depth,
        peak_flops=measure(placement.accelerator.device, compute_dtype(config)).flops,
    )


def export(config: TrainConfig, prepared: Prepared, record: Mapping[str, Any]) -> tuple[Path, Measured]:
    """Publish the head. Returns its folder, and what was measured of its files."""
    return export_head(prepared.head, prepared.target, config, record, prepared.evaluator.measure_fully)


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


REPORT = "report.md"
SHOWN = ("step", "eval/tau_engine", "eval/tau_simulated", "eval/loss", "eval/coverage")


def write_report(
    folder: Path, config: TrainConfig, record: Mapping[str, Any], measured: Measured, results: Results
) -> Path:
    path = folder / REPORT
    atomic.write_text(path, report(folder, config, record, measured, results))
    return path


def report(folder: Path, config: TrainConfig, record: Mapping[str, Any], measured: Measured, results: Results) -> str:
    rows = [row for row in read_metrics(folder) if "eval/tau_engine" in row]
    commit = ((record.get("git") or {}).get("commit") or "unknown")[:12]
    depth = len(measured.greedy.engine.acceptance_by_position)
    parts = [
        f"# {config.run}: {config.head.name} for {config.model.name}",
        f"{record['steps']} updates over {record['tokens']:,} tokens, {record['trained_parameters']:,} parameters, "
        f"{record['seconds'] / 60:.1f} minutes of updates; commit `{commit}`. Data: {record['data_source']} "
        f"(hash `{record['data_hash']}`).",
        data_lines(record.get("data_counts") or {}),
        named_rows(folder),
        "## Acceptance",
        f"Chains of up to {config.eval_draft_tokens} tokens, {config.eval_prompts} held-out prompts of up to "
        f"{config.eval_max_tokens} tokens each. τ: tokens per verify, the bonus token included.",
        table(
            ["", "τ, engine", "τ, simulated", "gap", *(f"position {place}" for place in range(1, depth + 1))],
            [line("greedy", measured.greedy), line("temperature 1", measured.sampled)],
        ),
        "## On the way",
        table(
            [name.removeprefix("eval/") for name in SHOWN], [[number(row.get(name)) for name in SHOWN] for row in rows]
        ),
        *(f"![{plot.stem}]({plot.name})" for plot in results.plots),
        "## Where time went",
        time_lines(read_metrics(folder), record.get("peak_flops")),
        texts(results.samples),
        "## Settings",
        fenced("\n".join(f"{key}={value}" for key, value in flatten(record["config"]).items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def texts(samples: Sequence[Sample]) -> str:
    """Return the section with sample texts."""
    parts = (
        f"τ {sample.acceptance_length:.2f}\n\n{fenced(sample.prompt)}\n\n{fenced(sample.text)}" for sample in samples
    )
    about = "Greedy answers to held-out prompts; what was drafted and accepted stands between ⟦ and ⟧."
    return "\n\n".join(["## Texts", about, *parts])


def time_lines(rows: Sequence[Mapping[str, float]], peak: float | None) -> str:
    """Return the section on step times, as medians over the logged steps without the first, which warms up.

    `peak`: FLOP/s that a matrix product reached on this machine.
    """
    steps = [row for row in rows if "time/head" in row][1:]
    if not steps:
        return "Too few steps were logged to say."
    parts = {part: statistics.median(row[f"time/{part}"] for row in steps) for part in PARTS}
    total = sum(parts.values())
    used = statistics.median(row["train/head_flops_per_s"] for row in steps)
    speed, memory = (
        statistics.median(row[f"train/{name}"] for row in steps) for name in ("tokens_per_s", "memory_bytes")
    )
    lines = [
        table(["part of a step", "ms", "share"], [[p, f"{1e3 * s:.1f}", f"{s / total:.1%}"] for p, s in parts.items()]),
        f"Medians of {len(steps)} steps: {speed:,.0f} tokens/s, {memory / 1e9:.2f} GB. The head's own products ran at "
        f"{used / 1e9:.2f} GFLOP/s"
        + (f", {used / peak:.1%} of what a matrix product reaches here (model FLOPs utilisation)." if peak else "."),
    ]
    return "\n\n".join(lines)


def named_rows(folder: Path) -> str:
    """Return the first rows that were left out, shortened or failed, and why."""
    path = folder / "data" / SOURCE
    named = read_record(path).get(NAMED, {}) if path.is_file() else {}
    lines = [line for label, rows in named.items() for line in first_of(label, rows)]
    return fenced("\n".join(lines)) if lines else ""


def line(name: str, acceptance: Acceptance) -> list[str]:
    engine = acceptance.engine
    shares = [f"{share:.3f}" for share in engine.acceptance_by_position]
    taus = [stated(tau(stats)) for stats in (engine, acceptance.simulated)]
    return [name, *taus, stated(100 * acceptance.gap, "+.2f", " %"), *shares]


def fenced(text: str) -> str:
    """Return the text as a code block, with a fence longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def number(value: Any) -> str:
    return "" if value is None else stated(value, ".4g")
