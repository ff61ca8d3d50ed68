"""Writes README.md's tables anew from the newest result files, so that no number in them is typed by hand.

    python scripts/make_tables.py            # rewrites what stands between <!-- table NAME --> and <!-- end -->
    python scripts/make_tables.py --check    # only says whether something would change; exit code 1 if so

NAME is what a result was saved under: `python scripts/bench.py ... save=NAME` writes scripts/results/NAME-*.json.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

README, RESULTS = Path(HERE).parent / "README.md", Path(HERE) / "results"
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "off": "plain",
    "ngram": "n-gram lookup",
    "suffix": "suffix decoding",
    "draft_model": "draft model",
    "hf": "transformers",
    "hf_lookup": "transformers, prompt lookup",
}
Cell = dict[str, Any]


def newest(name: str) -> Path:
    """The result file of that name with the latest date. Raises ValueError if there is none."""
    files = sorted(RESULTS.glob(f"{name}-*.json"), key=lambda file: file.stem.rpartition("_")[2])
    if not files:
        raise ValueError(f"scripts/results/{name}-*.json: no such file; make it with scripts/bench.py save={name}")
    return files[-1]


def label(system: str) -> str:
    """`head:tree16` of an eagle3 head -> "head, tree 16"."""
    name, _, shape = system.partition(":")
    words = re.sub(r"(\D+)(\d+)", r"\1 \2", shape)
    return ", ".join(filter(None, (NAMES.get(name, name), words)))


def speed(cell: Cell) -> str:
    return f"{cell['tokens_per_s']['median']:.0f}"


def ratio(cell: Cell) -> str:
    return f"{cell['ratio']['median']:.2f}"


def length(cell: Cell) -> str:
    return "1" if cell["acceptance_length"] is None else f"{cell['acceptance_length']:.2f}"


def rows_of(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_concurrency(result: Cell) -> str:
    """One row per number of requests, one column per system: tokens/s and the ratio to plain decoding."""
    (cells,) = result["results"].values()
    systems = list(next(iter(cells.values())))
    rows = [
        [count, *(speed(own[s]) if s == "off" else f"{speed(own[s])} ({ratio(own[s])})" for s in systems)]
        for count, own in cells.items()
    ]
    return rows_of(["requests at once", *map(label, systems)], rows)


def by_temperature(result: Cell) -> str:
    """One row per system, for each temperature its τ and the ratio of its speed to plain decoding, at one request."""
    temperatures = list(result["results"])
    own = {temperature: next(iter(cells.values())) for temperature, cells in result["results"].items()}
    header = ["drafts", *(f"T = {t}: {what}" for t in temperatures for what in ("τ", "ratio"))]
    rows = [
        [label(system), *(text for t in temperatures for text in (length(own[t][system]), ratio(own[t][system])))]
        for system in own[temperatures[0]]
    ]
    return rows_of(header, rows)


def by_head(result: Cell) -> str:
    """One row per head and shape: what it cost to train, τ, and speed at the fewest and the most requests."""
    temperatures = list(result["results"])
    counts = list(result["results"][temperatures[0]])
    speeds = json.loads(newest("training").read_text(encoding="utf-8"))["heads"]
    rows = []
    for system in result["results"][temperatures[0]][counts[0]]:
        own = {(t, n): result["results"][t][n][system] for t in temperatures for n in counts}
        name = system.partition(":")[0]
        head = result["heads"].get(name, {})
        simulated = [head.get(key, {}).get("simulated") for key in ("acceptance_length", "acceptance_length_sampled")]
        rows.append(
            [
                label(system),
                f"{head['trained_parameters'] / 1e6:.1f} M" if head else "",
                f"{head['tokens'] / speeds[name]['tokens_per_s'] / 60:.0f} min" if head else "",
                " / ".join(f"{value:.2f}" for value in simulated) if head and "chain" in system else "",
                " / ".join(length(own[t, counts[0]]) for t in temperatures),
                *(f"{speed(own['0', n])} ({ratio(own['0', n])})" for n in counts),
            ]
        )
    at = [f"tokens/s at {count}" for count in counts]
    taus = " / ".join(f"T = {temperature}" for temperature in temperatures)
    return rows_of(
        ["head", "trained parameters", "training", f"simulated τ, {taus}", f"τ in the engine, {taus}", *at], rows
    )


def plot_heads(result: Cell, path: Path) -> None:
    """τ and the ratio of speed at one request, greedy: a bar for every head and shape."""
    from matplotlib.figure import Figure

    cells = next(iter(result["results"]["0"].values()))
    systems = [system for system in cells if system != "off"]
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axes, title, values in zip(
        figure.subplots(1, 2, sharey=True),
        ("acceptance length τ", "speed, plain decoding = 1"),
        ([cells[s]["acceptance_length"] for s in systems], [cells[s]["ratio"]["median"] for s in systems]),
        strict=True,
    ):
        colours = ["tab:blue" if "chain" in system else "tab:orange" for system in systems]
        bars = axes.barh([label(system) for system in systems], values, color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, 1.15 * max(values))
        axes.set_title(title, fontsize=10)
    axes.invert_yaxis()  # shared by both: the first system on top
    figure.savefig(path, dpi=110)


TABLES: dict[str, Callable[[Cell], str]] = {"generate": by_concurrency, "shapes": by_temperature, "heads": by_head}


def rewrite(text: str) -> str:
    """`text` with every table between its marks written anew."""

    def table(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise ValueError(f"<!-- table {name} -->: no such table; known: {', '.join(TABLES)}")
        file = newest(name)
        result = json.loads(file.read_text(encoding="utf-8"))
        commit = (result["machine"]["commit"] or "unknown")[:7]
        source = f"[{file.name}]({file.relative_to(README.parent)}), commit {commit}."
        return f"{found[1]}{TABLES[name](result)}\n{source}\n{found[3]}"

    return BLOCK.sub(table, text)


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    before = README.read_text(encoding="utf-8")
    try:
        after = rewrite(before)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    if "<!-- table heads -->" in after:
        plot_heads(json.loads(newest("heads").read_text(encoding="utf-8")), RESULTS / "heads.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
