"""Plots in the run's folder: loss.png and acceptance.png over the steps; at its end acceptance_by_depth.png."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from train.acceptance import Measured
from train.publishing.trackers import read_metrics, warn
from train.storage import atomic

Curves = Mapping[str, Sequence[tuple[float, float]]]  # points by label


def draw_plots(folder: Path, measured: Measured | None = None) -> list[Path]:
    """Write the plots and return their paths; without matplotlib print a note and return none."""
    if importlib.util.find_spec("matplotlib") is None:
        warn("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    rows = read_metrics(folder)

    def over_steps(names: Mapping[str, str]) -> Curves:
        return {label: [(row["step"], row[name]) for row in rows if name in row] for name, label in names.items()}

    losses = over_steps({"train/loss": "training", "eval/loss": "held-out"})
    taus = over_steps({"eval/tau_engine": "τ, engine", "eval/tau_simulated": "τ, simulated"})
    written = [
        draw(folder / "loss.png", losses, xlabel="step", ylabel="loss"),
        draw(folder / "acceptance.png", taus, xlabel="step", ylabel="tokens per verify"),
    ]
    if measured is not None:
        depths = {
            label: list(enumerate(acceptance.engine.acceptance_by_position, start=1))
            for label, acceptance in (("greedy", measured.greedy), ("temperature 1", measured.sampled))
        }
        names = {"xlabel": "position in the draft", "ylabel": "share that is accepted"}
        written.append(draw(folder / "acceptance_by_depth.png", depths, **names, ylim=(0, 1)))
    return written


def draw(path: Path, curves: Curves, **axes: Any) -> Path:
    """Write a plot, titled with its folder's name, and return its path. `axes`: what matplotlib's Axes.set takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.7), dpi=120, layout="constrained")
    plot = figure.subplots()
    for label, points in curves.items():
        if points:
            few = "o" if len(points) < 50 else None
            line = "--" if "simulated" in label else "-"  # the curve should coincide with the engine's
            plot.plot(*zip(*points, strict=True), line, label=label, marker=few, markersize=3, linewidth=1)
    plot.set(title=path.parent.name, **axes)
    plot.grid(alpha=0.3)
    if any(curves.values()):
        plot.legend()
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    atomic.write_bytes(path, picture.getvalue())
    return path
