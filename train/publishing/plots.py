"""Plots in the run's folder: loss.png and acceptance.png over the steps; at the end of the run acceptance_by_depth.png
and, if measured, speed.png over the number of concurrent requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from train.publishing.export import Measured
from train.publishing.trackers import read_metrics, warn
from train.storage import atomic

Curves = Mapping[str, Sequence[tuple[float, float]]]  # points by label
PLAIN_SPEED = "speed, plain decoding = 1"


@dataclass(frozen=True)
class Panel:
    """One plot of a figure."""

    curves: Curves
    x: str
    y: str
    title: str = ""
    dashed: str | None = None  # the label of a curve
    level: float | None = None  # of a grey horizontal line, a baseline
    legend: str | None = None  # its title
    axes: Mapping[str, Any] = field(default_factory=dict)  # what else matplotlib's Axes.set takes


def draw_plots(folder: Path, measured: Measured | None = None, speeds: Mapping[int, float] | None = None) -> list[Path]:
    """Write the plots and return their paths; without matplotlib print a note and return none.

    `speeds`: speed relative to plain decoding, by number of concurrent requests.
    """
    rows = read_metrics(folder)

    def over_steps(names: Mapping[str, str]) -> Curves:
        return {label: [(row["step"], row[name]) for row in rows if name in row] for name, label in names.items()}

    losses = over_steps({"train/loss": "training", "eval/loss": "held-out"})
    taus = over_steps({"eval/tau_engine": "τ, engine", "eval/tau_simulated": "τ, simulated"})
    written = [
        draw(folder / "loss.png", Panel(losses, "step", "loss", folder.name)),
        # dashed, because the simulated curve should coincide with the engine's
        draw(folder / "acceptance.png", Panel(taus, "step", "tokens per verify", folder.name, dashed="τ, simulated")),
    ]
    if measured is not None:
        depths = {
            label: list(enumerate(acceptance.engine.acceptance_by_position, start=1))
            for label, acceptance in (("greedy", measured.greedy), ("temperature 1", measured.sampled))
        }
        written.append(draw(folder / "acceptance_by_depth.png", by_position(depths, folder.name)))
    if speeds:
        curve = {"greedy": list(speeds.items())}
        written.append(draw(folder / "speed.png", Panel(curve, "requests at once", PLAIN_SPEED, folder.name, level=1)))
    return [path for path in written if path is not None]


def by_position(curves: Curves, title: str) -> Panel:
    return Panel(curves, "position in the draft", "share that is accepted", title, axes={"ylim": (0, 1)})


def draw(path: Path, *panels: Panel, columns: int = 1) -> Path | None:
    """Write a figure with the panels in rows of `columns`, and return its path; without matplotlib print a note and
    return None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warn("no plots: matplotlib is not installed (pip install matplotlib)")
        return None
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.7 * rows), dpi=120, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in places[len(panels) :]:
        place.remove()
    for plot, panel in zip(places, panels, strict=False):
        for label, points in panel.curves.items():
            if points:
                few = "o" if len(points) < 50 else None
                line = "--" if label == panel.dashed else "-"
                plot.plot(*zip(*points, strict=True), line, label=label, marker=few, markersize=3, linewidth=1)
        if panel.level is not None:
            plot.axhline(panel.level, color="grey", linewidth=1)
        plot.set(xlabel=panel.x, ylabel=panel.y, title=panel.title, **panel.axes)
        plot.grid(alpha=0.3)
        if any(panel.curves.values()):
            plot.legend(fontsize=7 if len(panel.curves) > 4 else None, title=panel.legend)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    atomic.write_bytes(path, picture.getvalue())
    return path
