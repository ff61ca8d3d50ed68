"""Curves of a run, drawn from its metrics.jsonl: loss.png and acceptance.png in the run's folder."""

from __future__ import annotations

from pathlib import Path

from train.trackers import read_metrics, warn


def draw_plots(folder: Path) -> list[Path]:
    """The files written; none, with a note, when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warn("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    rows = read_metrics(folder)
    written = []
    for name, unit, curves in (
        ("loss", "loss", {"train/loss": "training", "eval/loss": "held-out"}),
        ("acceptance", "tokens per verify", {"eval/tau_engine": "τ, engine", "eval/tau_simulated": "τ, simulated"}),
    ):
        figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for metric, label in curves.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if points:
                marker = "o" if metric.startswith("eval") else None
                line = "--" if metric == "eval/tau_simulated" else "-"  # it lies on the engine's, as it should
                axes.plot(*zip(*points, strict=True), line, label=label, marker=marker, markersize=3, linewidth=1)
        axes.set(xlabel="step", ylabel=unit, title=folder.name)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
        path = folder / f"{name}.png"
        figure.savefig(path)
        written.append(path)
    return written
