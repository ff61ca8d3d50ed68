"""Draws the pictures of README.md and of the manuals into docs/images.

    python -m docs.images.draw chart       # speed.svg, from the newest scripts/results/smollm2-programs-*.json
    python -m docs.images.draw terminal    # chat.svg, from what a command prints with colors, on standard input
    python -m docs.images.draw learning    # learning.svg, from the newest scripts/results/smollm2-traffic-*.json
    python -m docs.images.draw scaling     # scaling.svg, from the newest scripts/results/smollm2-scaling-*.json

The chat, without the card at the start:

    printf 'Write a Python function that returns the larger of two numbers.\\n/off\\n/regenerate\\n' |
        python infer/chat.py color=always max_tokens=160 temperature=0 2>&1 | sed 1,14d |
        python -m docs.images.draw terminal
"""

import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from scripts.benchmarks.comparison.systems import is_ours
from tests.manual_tables import OURS, best_peer, newest_programs, speed
from tests.manual_tables import label as label_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "scripts" / "results"
BARS = {OURS: "Headway, head", "off": "Headway, no drafts"}  # ours; the others are programs, each in its fastest mode
LABEL, PANEL, BAR, GAP, TOP = 150, 220, 18, 10, 62  # pixels
OURS_COLOR, BEST_COLOR, OTHERS_COLOR = "#1a7f37", "#57606a", "#afb8c1"
COLUMNS, LINES = 92, 60  # of the terminal
LEFT, RIGHT, UPPER, LOWER = 60, 620, 44, 224  # pixels: the edges of a plot over time
WINDOWS = 8  # of a result of `bench.py traffic`, in one point
PLOT, APART, LINE = 300, 170, 15  # pixels: a plot over tokens, from one to the next, and between labels
COLORS = ("#1a7f37", "#0969da", "#bc4c00", "#8250df", "#24292f")
STYLE = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13" fill="#24292f"'


def chart(results: Mapping[str, Any]) -> str:
    """Return an SVG with one panel per number of requests, from a bench's `results` at temperature 0.

    A bar is the fastest of the systems of its name in that panel. The best of the other programs is named above.
    """
    levels = next(iter(results.values()))
    names = [*BARS.values(), *(program_of(system) for system in next(iter(levels.values())) if not is_ours(system))]
    rows = {name: TOP + row * (BAR + GAP) for row, name in enumerate(dict.fromkeys(names))}
    parts = sheet(LABEL + len(levels) * PANEL, TOP + len(rows) * (BAR + GAP) + GAP)
    parts += [f'<text x="{LABEL - 10}" y="{y + 14}" text-anchor="end">{name}</text>' for name, y in rows.items()]
    for panel, (count, cells) in enumerate(levels.items()):
        left, best = LABEL + panel * PANEL, best_peer(cells)
        requests = "1 request" if count == "1" else f"{count} requests"
        parts.append(f'<text x="{left}" y="24" font-weight="bold">{requests}, tokens/s</text>')
        mode = label_of(best.partition(":chain")[0])
        parts.append(f'<text x="{left}" y="44" font-size="11">best other: {mode}</text>')
        shown = [(BARS.get(system) or program_of(system), system) for system in cells]
        bars = {name: max(speed(cells[system]) for bar, system in shown if bar == name) for name in rows}
        for name, y in rows.items():
            length = (PANEL - 70) * bars[name] / max(bars.values())
            color = OURS_COLOR if name in BARS.values() else BEST_COLOR if name == program_of(best) else OTHERS_COLOR
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6:.0f}" y="{y + 14}">{bars[name]:.0f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def program_of(system: str) -> str:
    """`hf_lookup` -> "transformers"; `vllm:ngram:chain3` -> "vLLM"."""
    return label_of(system).partition(",")[0]


def terminal(printed: str) -> str:
    """Return an SVG of a terminal that shows `printed`, whose escape codes color it."""
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed.rstrip()), soft_wrap=False)
    svg = console.export_svg(title="python infer/chat.py", theme=MONOKAI, unique_id="chat")
    return re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL)  # fonts of another host


def averaged(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the means of a number of every `WINDOWS` windows of a kind, the last of them of fewer."""
    kinds = [[row[key] for row in some] for _, some in groupby(rows, itemgetter("kind"))]
    return [mean(some[place : place + WINDOWS]) for some in kinds for place in range(0, len(some), WINDOWS)]


def learning(learns: Sequence[Mapping[str, Any]], stays: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of τ over hours: of two results of `bench.py traffic`, the second of the first one's requests."""
    curves = {"learns": averaged(learns, "tau"), "stays as it was": averaged(stays, "tau")}
    hours, colors = [row["minute"] / 60 for row in learns], ("#1a7f37", "#6e7781")
    low, high = math.floor(2 * min(map(min, curves.values()))) / 2, math.ceil(2 * max(map(max, curves.values()))) / 2
    x_scale, y_scale = (RIGHT - LEFT) / hours[-1], (LOWER - UPPER) / (high - low)
    xs = [LEFT + x_scale * minute / 60 for minute in averaged(learns, "minute")]
    parts = [
        *sheet(RIGHT + 120, LOWER + 40),
        f'<text x="{LEFT}" y="22" font-weight="bold">tokens emitted per verify (τ)</text>',
        f'<text x="{RIGHT}" y="{LOWER + 30}" text-anchor="end">{hours[-1]:.1f} hours</text>',
        *grid(LEFT, RIGHT, low, high),
    ]
    for kind in dict.fromkeys(row["kind"] for row in learns):
        first = next(place for place, row in enumerate(learns) if row["kind"] == kind)
        x = LEFT + x_scale * (hours[first - 1] if first else 0)
        parts.append(f'<path d="M{x:.1f} {UPPER}V{LOWER}" stroke="#afb8c1"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{LOWER + 18}">{kind}</text>')
    for (label, taus), color in zip(curves.items(), colors, strict=True):
        ys = [LOWER - y_scale * (tau - low) for tau in taus]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{RIGHT + 8}" y="{ys[-1] + 4:.1f}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def scaling(results: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of τ by set, and of acceptance by position in the mean of the sets, over tokens trained on."""
    results = sorted(results, key=lambda result: result["tokens"])
    millions, sets = [result["tokens"] / 1e6 for result in results], list(results[0]["sets"])
    taus = {name: [result["sets"][name]["tau"] for result in results] for name in sets}
    taus["mean"] = [mean(column) for column in zip(*taus.values(), strict=True)]
    shares = [zip(*(result["sets"][name]["by_position"] for name in sets), strict=True) for result in results]
    by_position = zip(*([mean(share) for share in places] for places in shares), strict=True)
    positions = {f"position {place}": column for place, column in enumerate(by_position, start=1)}
    parts = sheet(LEFT + 2 * (PLOT + APART), LOWER + 52)
    parts += over_tokens(LEFT, "tokens emitted per verify (τ)", millions, taus, low=1)
    parts += over_tokens(LEFT + PLOT + APART, "share of drafted tokens accepted", millions, positions, low=0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def over_tokens(
    left: int, title: str, millions: Sequence[float], curves: Mapping[str, Sequence[float]], low: float
) -> list[str]:
    """Return a plot of curves over a logarithmic axis, with its left edge at `left`."""
    right, high = left + PLOT, math.ceil(2 * max(map(max, curves.values()))) / 2
    first, last = math.floor(math.log2(millions[0])), math.ceil(math.log2(millions[-1]))
    xs = [left + PLOT * (math.log2(million) - first) / (last - first) for million in millions]
    places = {name: [LOWER - (LOWER - UPPER) * (y - low) / (high - low) for y in ys] for name, ys in curves.items()}
    parts = [f'<text x="{left}" y="22" font-weight="bold">{title}</text>', *grid(left, right, low, high)]
    for power in range(first, last + 1):
        x = left + PLOT * (power - first) / (last - first)
        parts.append(f'<text x="{x:.1f}" y="{LOWER + 18}" text-anchor="middle">{2.0**power:g}</text>')
    axis = "million tokens of responses trained on, every pass counted"
    parts.append(f'<text x="{left}" y="{LOWER + 40}">{axis}</text>')
    labels = spaced({name: ys[-1] for name, ys in places.items()})
    for (name, ys), color in zip(places.items(), COLORS[: len(places)], strict=True):
        points = list(zip(xs, ys, strict=True))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        parts.append(f'<text x="{right + 8}" y="{labels[name] + 4:.1f}" fill="{color}">{name}</text>')
    return parts


def spaced(heights: Mapping[str, float]) -> dict[str, float]:
    """Return heights at which labels do not overlap, in the same order."""
    free, result = -math.inf, {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        result[name] = max(y, free)
        free = result[name] + LINE
    return result


def sheet(width: int, height: int) -> list[str]:
    """Return the start of an SVG: a white sheet of this size."""
    return [
        f'<svg {STYLE} width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]


def grid(left: int, right: int, low: float, high: float) -> list[str]:
    """Return a line with its number at every half from `low`, a multiple of that, to `high`."""
    parts = []
    for level in range(round(2 * low), round(2 * high) + 1):
        y = LOWER - (LOWER - UPPER) * (level / 2 - low) / (high - low)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{level / 2:.1f}</text>')
    return parts


def newest(name: str) -> Any:
    """Return the results of the newest file of this name."""
    file = max(RESULTS.glob(f"{name}-*.json"), key=lambda file: file.stem.rsplit("_", 1)[1])
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def main() -> int:
    if sys.argv[1:] == ["chart"]:
        (HERE / "speed.svg").write_text(chart(newest_programs()["results"]), encoding="utf-8")
    elif sys.argv[1:] == ["terminal"]:
        (HERE / "chat.svg").write_text(terminal(sys.stdin.read()), encoding="utf-8")
    elif sys.argv[1:] == ["learning"]:
        pair = newest("smollm2-traffic-learns"), newest("smollm2-traffic-stays")
        (HERE / "learning.svg").write_text(learning(*pair), encoding="utf-8")
    elif sys.argv[1:] == ["scaling"]:
        (HERE / "scaling.svg").write_text(scaling(newest("smollm2-scaling")), encoding="utf-8")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
