"""Draws the pictures of README.md and of the manuals into docs/images.

    python docs/images/draw.py chart       # speed.svg, from the newest scripts/results/smollm2-programs-*.json
    python docs/images/draw.py terminal    # chat.svg, from what a command prints with colors, on standard input
    python docs/images/draw.py learning    # learning.svg, from what a server's /learning says, on standard input

The chat, without the card at the start:

    printf 'Write a Python function that returns the larger of two numbers.\\n/off\\n/regenerate\\n' |
        python infer/chat.py color=always max_tokens=160 temperature=0 2>&1 | sed 1,14d |
        python docs/images/draw.py terminal
"""

import io
import json
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


def learning(history: Sequence[tuple[float, float, int]]) -> str:
    """Return an SVG of τ over minutes, of two judgements at least; a dot where a head was taken over."""
    start, end = history[0][0], history[-1][0]
    low, high = (edge(tau for _, tau, _ in history) for edge in (min, max))
    x_scale, y_scale = (RIGHT - LEFT) / (end - start), (LOWER - UPPER) / (high - low)
    places = [(LEFT + x_scale * (time - start), LOWER - y_scale * (tau - low)) for time, tau, _ in history]
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13" fill="#24292f"'
    parts = [
        f'<svg {style} width="{RIGHT + 30}" height="{LOWER + 36}" viewBox="0 0 {RIGHT + 30} {LOWER + 36}">',
        f'<rect width="{RIGHT + 30}" height="{LOWER + 36}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">τ on requests held back; a dot: a head was taken over</text>',
        f'<path d="M{LEFT} {LOWER}H{RIGHT}" stroke="#afb8c1"/>',
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" stroke="#1a7f37"/>',
        f'<text x="{LEFT - 8}" y="{LOWER}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{LEFT - 8}" y="{UPPER}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{LEFT}" y="{LOWER + 20}">0</text>',
        f'<text x="{RIGHT}" y="{LOWER + 20}" text-anchor="end">{(end - start) / 60:.0f} minutes</text>',
    ]
    for (*_, before), (*_, after), (x, y) in zip(history, history[1:], places[1:], strict=False):
        if after > before:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1a7f37"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    if sys.argv[1:] == ["chart"]:
        newest = max(RESULTS.glob("smollm2-programs-*.json"), key=lambda file: file.stem.rsplit("_", 1)[1])
        document = json.loads(newest.read_text(encoding="utf-8"))
        (HERE / "speed.svg").write_text(chart(document["results"]), encoding="utf-8")
    elif sys.argv[1:] == ["terminal"]:
        (HERE / "chat.svg").write_text(terminal(sys.stdin.read()), encoding="utf-8")
    elif sys.argv[1:] == ["learning"]:
        (HERE / "learning.svg").write_text(learning(json.load(sys.stdin)["history"]), encoding="utf-8")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
