"""Pictures in the run's folder: loss.png and acceptance.png over the steps, acceptance_by_depth.png at the end."""

from __future__ import annotations

from pathlib import Path

from train.export import Measured
from train.trackers import read_metrics, warn


def draw_plots(folder: Path, measured: Measured | None = None) -> list[Path]:
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
    if measured is None:
        return written
    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for label, acceptance in (("greedy", measured.greedy), ("temperature 1", measured.sampled)):
        shares = acceptance.engine.acceptance_by_position
        axes.plot(range(1, len(shares) + 1), shares, label=label, marker="o", markersize=3, linewidth=1)
    axes.set(xlabel="position in the draft", ylabel="share that is accepted", ylim=(0, 1), title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    written.append(folder / "acceptance_by_depth.png")
    figure.savefig(written[-1])
    return written
