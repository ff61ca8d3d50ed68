"""Plots in the run's folder: loss.png and acceptance.png over the steps; at the end of the run acceptance_by_depth.png
and, if measured, speed.png over the number of concurrent requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from train.publishing.export import Measured
from train.publishing.trackers import read_metrics, warn
from train.storage import atomic

Curves = Mapping[str, Sequence[tuple[float, float]]]  # points by label
PLAIN_SPEED = "speed, plain decoding = 1"


def draw_plots(folder: Path, measured: Measured | None = None, speeds: Mapping[int, float] | None = None) -> list[Path]:
    """Write the plots and return their paths; without matplotlib print a note and return none.

    `speeds`: speed relative to plain decoding, by number of concurrent requests.
    """
    rows = read_metrics(folder)

    def over_steps(names: Mapping[str, str]) -> Curves:
        return {label: [(row["step"], row[name]) for row in rows if name in row] for name, label in names.items()}

    losses = over_steps({"train/loss": "training", "eval/loss": "held-out"})
    taus = over_steps({"eval/tau_engine": "τ, engine", "eval/tau_simulated": "τ, simulated"})
    title: dict[str, Any] = {"title": folder.name}
    written = [
        draw_curves(folder / "loss.png", losses, "step", "loss", **title),
        # dashed, because the simulated curve should coincide with the engine's
        draw_curves(folder / "acceptance.png", taus, "step", "tokens per verify", dashed=("τ, simulated",), **title),
    ]
    if measured is not None:
        depths = {
            label: list(enumerate(acceptance.engine.acceptance_by_position, start=1))
            for label, acceptance in (("greedy", measured.greedy), ("temperature 1", measured.sampled))
        }
        names = "position in the draft", "share that is accepted"
        written.append(draw_curves(folder / "acceptance_by_depth.png", depths, *names, ylim=(0, 1), **title))
    if speeds:
        curve = {"greedy": list(speeds.items())}
        written.append(draw_curves(folder / "speed.png", curve, "requests at once", PLAIN_SPEED, level=1, **title))
    return [path for path in written if path is not None]


def draw_curves(
    path: Path, curves: Curves, x: str, y: str, *, dashed: Sequence[str] = (), level: float | None = None, **axes: Any
) -> Path | None:
    """Write a PNG and return its path; without matplotlib print a note and return None.

    `level`: draw a grey horizontal line there, as a baseline.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warn("no plots: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    plot = figure.add_subplot()
    for label, points in curves.items():
        if points:
            few = "o" if len(points) < 50 else None
            line = "--" if label in dashed else "-"
            plot.plot(*zip(*points, strict=True), line, label=label, marker=few, markersize=3, linewidth=1)
    if level is not None:
        plot.axhline(level, color="grey", linewidth=1)
    plot.set(xlabel=x, ylabel=y, **axes)
    plot.grid(alpha=0.3)
    if any(curves.values()):
        plot.legend(fontsize=7 if len(curves) > 4 else None)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    atomic.write_bytes(path, picture.getvalue())
    return path
