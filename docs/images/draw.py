"""Draws the pictures of README.md and of the manuals into docs/images.

    python docs/images/draw.py chart       # speed.svg, from the newest scripts/results/smollm2-programs-*.json
    python docs/images/draw.py terminal    # chat.svg, from what a command prints with colors, on standard input
    python docs/images/draw.py learning    # learning.svg, from the newest scripts/results/smollm2-traffic-*.json

The chat, without the card at the start:

    printf 'Write a Python function that returns the larger of two numbers.\\n/off\\n/regenerate\\n' |
        python infer/chat.py color=always max_tokens=160 temperature=0 2>&1 | sed 1,14d |
        python docs/images/draw.py terminal
"""

import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "scripts" / "results"
# One bar each: its label, the systems of which the fastest counts, and whether it is ours.
BARS = (
    ("Headway, head", ("head:auto5",), True),
    ("Headway, no drafts", ("off",), True),
    ("vLLM", ("vllm", "vllm:ngram:chain3", "vllm:head:chain3"), False),
    ("transformers", ("hf", "hf_lookup"), False),
    ("llama.cpp", ("llama.cpp", "llama.cpp:ngram:chain3", "llama.cpp:head:chain3"), False),
)
LABEL, PANEL, BAR, GAP, TOP = 150, 210, 18, 10, 44  # pixels
COLUMNS, LINES = 92, 60  # of the terminal
LEFT, RIGHT, UPPER, LOWER = 60, 620, 44, 224  # pixels: the edges of a plot over time


def chart(results: Mapping[str, Any]) -> str:
    """Return an SVG with one panel per number of requests, from a bench's `results` at temperature 0."""
    levels = next(iter(results.values()))
    height = TOP + len(BARS) * (BAR + GAP) + GAP
    width = LABEL + len(levels) * PANEL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#24292f">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for panel, (count, cells) in enumerate(levels.items()):
        left = LABEL + panel * PANEL
        requests = "1 request" if count == "1" else f"{count} requests"
        parts.append(f'<text x="{left}" y="24" font-weight="bold">{requests}, tokens/s</text>')
        speeds = [max(cells[name]["tokens_per_s"]["median"] for name in names) for _, names, _ in BARS]
        for row, ((label, _, ours), speed) in enumerate(zip(BARS, speeds, strict=True)):
            y, length = TOP + row * (BAR + GAP), (PANEL - 60) * speed / max(speeds)
            if panel == 0:
                parts.append(f'<text x="{LABEL - 10}" y="{y + 14}" text-anchor="end">{label}</text>')
            color = "#1a7f37" if ours else "#afb8c1"
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6:.0f}" y="{y + 14}">{speed:.0f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def terminal(printed: str) -> str:
    """Return an SVG of a terminal that shows `printed`, whose escape codes color it."""
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed.rstrip()), soft_wrap=False)
    svg = console.export_svg(title="python infer/chat.py", theme=MONOKAI, unique_id="chat")
    return re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL)  # fonts of another host


def learning(learns: Sequence[Mapping[str, Any]], stays: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of τ over hours: of two results of `bench.py traffic`, the second of the first one's requests."""
    curves = {"learns": [row["tau"] for row in learns], "stays as it was": [row["tau"] for row in stays]}
    hours, colors = [row["minute"] / 60 for row in learns], ("#1a7f37", "#6e7781")
    low, high = math.floor(2 * min(map(min, curves.values()))) / 2, math.ceil(2 * max(map(max, curves.values()))) / 2
    x_scale, y_scale = (RIGHT - LEFT) / hours[-1], (LOWER - UPPER) / (high - low)
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13" fill="#24292f"'
    width, height = RIGHT + 120, LOWER + 40
    parts = [
        f'<svg {style} width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-weight="bold">tokens emitted per verify (τ)</text>',
        f'<text x="{RIGHT}" y="{LOWER + 30}" text-anchor="end">{hours[-1]:.1f} hours</text>',
    ]
    for level in range(round(2 * low), round(2 * high) + 1):
        y = LOWER - y_scale * (level / 2 - low)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level / 2:.1f}</text>')
    for kind in dict.fromkeys(row["kind"] for row in learns):
        first = next(place for place, row in enumerate(learns) if row["kind"] == kind)
        x = LEFT + x_scale * (hours[first - 1] if first else 0)
        parts.append(f'<path d="M{x:.1f} {UPPER}V{LOWER}" stroke="#afb8c1"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{LOWER + 18}">{kind}</text>')
    for (label, taus), color in zip(curves.items(), colors, strict=True):
        places = [(LEFT + x_scale * hour, LOWER - y_scale * (tau - low)) for hour, tau in zip(hours, taus, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{RIGHT + 8}" y="{places[-1][1] + 4:.1f}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def newest(name: str) -> Any:
    """Return the results of the newest file of this name."""
    file = max(RESULTS.glob(f"{name}-*.json"), key=lambda file: file.stem.rsplit("_", 1)[1])
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def main() -> int:
    if sys.argv[1:] == ["chart"]:
        (HERE / "speed.svg").write_text(chart(newest("smollm2-programs")), encoding="utf-8")
    elif sys.argv[1:] == ["terminal"]:
        (HERE / "chat.svg").write_text(terminal(sys.stdin.read()), encoding="utf-8")
    elif sys.argv[1:] == ["learning"]:
        pair = newest("smollm2-traffic-learns"), newest("smollm2-traffic-stays")
        (HERE / "learning.svg").write_text(learning(*pair), encoding="utf-8")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
