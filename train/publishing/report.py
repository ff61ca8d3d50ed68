"""report.md in the run's folder: data, acceptance, training curve, timings, sample texts and settings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.data.folder import NAMED, SOURCE
from train.data.prompts import first_of
from train.publishing.export import Acceptance, Measured, stated, tau
from train.publishing.trackers import Results, Sample, read_metrics
from train.step_clock import PARTS
from train.storage import atomic
from train.storage.reuse import read_record
from train.storage.run_folder import flatten

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


def data_lines(counts: Mapping[str, Any]) -> str:
    rows, responses = counts.get("rows"), counts.get("answers")
    if not rows or not responses:
        return ""
    dropped = ", ".join(f"{count} {reason}" for reason, count in rows["dropped"].items()) or "none"
    learnt = counts["learnt"]
    return (
        f"{rows['read']} rows were read: {rows['train']} to train on, {rows['held_out']} held out; left out: "
        f"{dropped}. Of {responses['conversations']} conversations {responses['done']} were answered, "
        f"{responses.get('skipped', 0)} held nothing to learn from, {responses['failed']} failed, "
        f"{counts.get('shortened', 0)} were shortened; there was no time for {counts.get('no_time', 0)} more. They "
        f"made {learnt['sequences']} sequences of {learnt['tokens']:,} tokens, {learnt['learnt']:,} of them learnt; "
        f"{learnt['left_out']} more were left out, because sequence_length leaves nothing to learn in them."
    )


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


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    width = max([len(names), *(len(row) for row in rows)])
    padded = [[*row, *[""] * (width - len(row))] for row in [names, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([lines[0], "|" + "---|" * width, *lines[1:]])
