"""Generates the tables of README.md and of the manuals from the newest result files, so no number is typed by hand.

    python scripts/make_tables.py            # rewrites the text between <!-- table NAME --> and <!-- end -->
    python scripts/make_tables.py --check    # only checks whether something would change; exit code 1 if so

NAME is the name a result was saved under: `python scripts/bench.py ... save=NAME` writes scripts/results/NAME-*.json.
The files in PAGES are rewritten. The plots of tables are redrawn too, next to the result files.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: F401

# isort: split

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT, RESULTS = Path(HERE).parent, Path(HERE) / "results"
FOLDERS = ("", "train", "infer", "infer/server", "models", "scripts")
PAGES = tuple(ROOT / folder / "README.md" for folder in FOLDERS)
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "off": "plain",
    "ngram": "n-gram lookup",
    "suffix": "suffix decoding",
    "draft_model": "draft model",
    "hf": "transformers",
    "hf_lookup": "transformers, prompt lookup",
    "hf_assisted": "transformers, assisted",
    "server": "Headway's server",
    "vllm": "vLLM",
}
SOURCES = {"ngram": "n-gram lookup", "head": "head"}
Cell = dict[str, Any]


def newest(name: str) -> Path:
    """Return the result file of that name with the latest date. Raises ValueError if there is none."""
    files = sorted(RESULTS.glob(f"{name}-*.json"), key=lambda file: file.stem.rpartition("_")[2])
    if not files:
        raise ValueError(f"scripts/results/{name}-*.json: no such file; make it with scripts/bench.py save={name}")
    return files[-1]


def label(system: str) -> str:
    """`head:tree16` -> "head, tree 16"; `vllm:ngram` -> "vLLM, n-gram lookup"."""
    name, *rest = system.split(":")
    words = (SOURCES.get(word) or numbered(word) for word in rest)
    return ", ".join((NAMES.get(name, name), *words))


def numbered(shape: str) -> str:
    """`tree16` -> "tree 16"."""
    return re.sub(r"(\D+)(\d+)", r"\1 \2", shape)


def speed(cell: Cell) -> str:
    return f"{cell['tokens_per_s']['median']:.0f}"


def ratio(cell: Cell) -> str:
    return f"{cell['ratio']['median']:.2f}"


def length(cell: Cell) -> str:
    return "1" if cell["acceptance_length"] is None else f"{cell['acceptance_length']:.2f}"


def rows_of(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_temperature(result: Cell) -> str:
    """Return a table with one row per system: τ and the ratio to plain decoding for each temperature, at the first
    concurrency.
    """
    temperatures = list(result["results"])
    grid = {temperature: next(iter(cells.values())) for temperature, cells in result["results"].items()}
    header = ["drafts", *(f"T = {t}: {column}" for t in temperatures for column in ("τ", "ratio"))]
    rows = [
        [label(system), *(text for t in temperatures for text in (length(grid[t][system]), ratio(grid[t][system])))]
        for system in grid[temperatures[0]]
    ]
    return rows_of(header, rows)


def by_program(result: Cell) -> str:
    """Return a table with one row per system: speed and ratio to plain decoding for every concurrency, τ, and how many
    responses equal those of plain decoding.
    """
    (cells,) = result["results"].values()
    counts = list(cells)
    rows = []
    for system in cells[counts[0]]:
        measured = [cells[count][system] for count in counts]
        same, total = (sum(cell["agreement"][i] for cell in measured if cell["agreement"]) for i in (0, 1))
        lengths = [length(cell) for cell in measured if cell["acceptance_length"] is not None]
        rows.append(
            [
                label(system),
                *(f"{speed(cell)} ({ratio(cell)})" for cell in measured),
                " / ".join(lengths),
                f"{same} of {total}" if total else "all" if all(cell["identical"] for cell in measured) else "NOT ALL",
            ]
        )
    return rows_of(["", *(f"tokens/s at {count}" for count in counts), "τ", "same answers"], rows)


def by_load(result: Cell) -> str:
    """Return a table with one row per server: for each load tokens/s and the median time of a whole response, which is
    a lower bound (≥) where requests were dropped.
    """

    def level(entry: Cell) -> str:
        bound = "≥ " if entry["unfinished"] else ""
        return f"{entry['tokens_per_s']:.0f}, {bound}{entry['latency_s'].get('p50', 0.0):.2f} s"

    rows = [[label(system), *map(level, levels)] for system, levels in result["results"].items()]
    loads = [entry["load"] for entry in next(iter(result["results"].values()))]
    return rows_of(["", *(f"load {load:g}" for load in loads)], rows)


def by_variant(result: Cell) -> str:
    """Return a table with one row per head: the speed of both training variants, their ratio, MFU and memory."""
    rows = []
    for head in [name for name in result["heads"] if f"{name}-against" in result["heads"]]:
        runs = [result["heads"][name] for name in (head, f"{head}-against")]
        speeds = [f"{run['tokens_per_s']:,.0f} ({run['low']:,.0f} to {run['high']:,.0f})" for run in runs]
        ratio = runs[0]["tokens_per_s"] / runs[1]["tokens_per_s"]
        used = " / ".join(f"{100 * run['mfu']:.0f} %" for run in runs)
        memory = " / ".join(f"{run['memory_gb']:.2f}" for run in runs)
        rows.append([head, *speeds, f"**{ratio:.2f}**", used, memory])
    against = ", ".join(result["against"].split(","))
    return rows_of(["head", "tokens/s", f"with {against}", "ratio", "MFU", "GB"], rows)


def by_batch(result: Cell) -> str:
    """Return a table with one row per temperature and concurrency: the speed of plain decoding and its variation, and
    for every other system the ratio to plain decoding and τ.
    """
    rows, others = [], list[str]()
    for temperature, cells in result["results"].items():
        for count, by_system in cells.items():
            others = [system for system in by_system if system not in ("off", "off:again")]
            again = by_system.get("off:again", by_system["off"])["ratio"]
            varies = f"{again['low']:.2f} to {again['high']:.2f}"
            entries = (text for s in others for text in (f"**{ratio(by_system[s])}**", length(by_system[s])))
            rows.append([temperature, count, speed(by_system["off"]), varies, *entries])
    titles = (title for system in others for title in (f"{label(system)}: ratio", "τ"))
    return rows_of(["T", "requests at once", "plain, tokens/s", "plain again: ratio", *titles], rows)


def by_run(result: Cell) -> str:
    """Return a table with one row per training run, and one of the evaluations.

    A run's row has the keys that differ from the first run, tokens trained, τ, acceptance by position and coverage.
    """
    rows = []
    for name, run in result["runs"].items():
        taus = (run[key]["engine"] for key in ("acceptance_length", "acceptance_length_sampled"))
        rows.append(
            [
                name,
                " ".join(f"`{key}={value}`" for key, value in described(run["differs"]).items()),
                f"{run['tokens']:,}",
                " / ".join(f"{tau:.2f}" for tau in taus),
                " ".join(f"{share:.2f}" for share in run["by_position"]),
                f"{100 * run['coverage']:.1f} %",
            ]
        )
    header = ["run", "differs in", "tokens", "τ, T = 0 / T = 1", "accepted by position, T = 0", "coverage"]
    return rows_of(header, rows) + by_data_set(result["evaluations"])


def by_shape(result: Cell) -> str:
    """Return a table of an evaluation with one row per draft shape and data set, and one for the mean over data sets.

    τ is listed for every temperature, acceptance by position and coverage of the draft vocabulary for the first.
    """
    cells = result["results"]
    sets, shapes = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("data", "shape"))
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in cells))
    rows = []
    for shape in shapes:
        taus = {
            (cell["data"], cell["temperature"]): cell["acceptance_length"] for cell in cells if cell["shape"] == shape
        }
        for data in sets:
            first = next(cell for cell in cells if (cell["data"], cell["shape"]) == (data, shape))
            rows.append(
                [
                    numbered(shape),
                    data,
                    *(f"{taus[data, temperature]:.2f}" for temperature in temperatures),
                    " ".join(f"{share:.2f}" for share in first["by_position"]),
                    f"{100 * first['coverage']:.1f} %",
                ]
            )
        means = (sum(taus[data, temperature] for data in sets) / len(sets) for temperature in temperatures)
        rows.append([numbered(shape), "**mean**", *(f"**{mean:.2f}**" for mean in means), "", ""])
    same = "all" if all(cell["identical"] for cell in cells) else "NOT ALL"
    header = ["drafts", "data", *(f"τ, T = {t:g}" for t in temperatures), "accepted by position", "coverage"]
    return rows_of(header, rows) + f"\nIds equal to plain decoding's: {same}.\n"


def by_data_set(evaluations: dict[str, list[Cell]]) -> str:
    """Return a table of τ with one row per evaluated head and one column per data set and temperature."""
    if not evaluations:
        return ""
    heads = {name: {key_of(cell): cell for cell in cells} for name, cells in evaluations.items()}
    keys = list(dict.fromkeys(key for by_key in heads.values() for key in by_key))
    rows = [
        [
            name,
            *(f"{by_key[key]['acceptance_length']:.2f}" if key in by_key else "" for key in keys),
            "yes" if all(cell["identical"] for cell in by_key.values()) else "NO",
        ]
        for name, by_key in heads.items()
    ]
    return "\n" + rows_of(["τ", *keys, "ids of plain decoding"], rows)


def key_of(cell: Cell) -> str:
    return f"{cell['data']}, T = {cell['temperature']:g}"


def described(differs: Cell) -> Cell:
    """Return the differences, or only the name if the head differs: the other differences follow from that."""
    return {"head": differs["head.name"]} if "head.name" in differs else differs


def plot_curves(result: Cell, path: Path) -> None:
    """Plot τ over the tokens trained, by head and by whether responses come from the target or from the data.

    Further panels show the final τ over the steps of training-time test and over the size of the draft vocabulary, if
    runs differ in these.
    """
    from matplotlib.figure import Figure

    base, runs = result["base"], result["runs"]
    first = next(iter(runs))
    changes: dict[str, Cell] = {name: described(item["differs"]) for name, item in runs.items()}
    sizes = {  # by key: a function from a run's name to its value of that key
        "objective.steps": lambda name: changes[name].get("objective.steps", base["objective.steps"]),
        "head.draft_vocab_size": lambda name: runs[name]["draft_vocab_size"],
    }
    points_of = {
        key: sorted((size_of(name), name) for name in runs if name == first or changes[name].keys() == {key})
        for key, size_of in sizes.items()
    }
    titles = {
        "objective.steps": "steps of training-time test (K)",
        "head.draft_vocab_size": "tokens that the head can draft",
    }
    panels = {
        "heads": (("head", "steps", "batch_size"), base["head.name"]),
        "responses of the target or of the data": (("data.responses",), base.get("data.responses", first)),
    }
    lines_of = {title: curves_of(runs, changes, *panel) for title, panel in panels.items()}
    curves = {title: lines for title, lines in lines_of.items() if len(lines) > 1 or title == "heads"}
    ends = {key: points for key, points in points_of.items() if len(points) > 1}
    count = len(curves) + len(ends)
    num_columns = 1 if count == 1 else 2
    num_rows = -(-count // num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 3.2 * num_rows), layout="constrained")
    places = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes in places[count:]:
        axes.remove()
    for axes, (title, lines) in zip(places, curves.items(), strict=False):
        for named, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=named)
        axes.set(xlabel="thousand tokens trained", ylabel="τ in the engine, greedy")
        axes.set_title(title, fontsize=10)
    for axes, (key, item) in zip(places[len(curves) :], ends.items(), strict=False):
        for measured, curve in (("acceptance_length", "greedy"), ("acceptance_length_sampled", "temperature 1")):
            points = [(value, runs[name][measured]["engine"]) for value, name in item]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=curve)
        axes.set(xlabel=key, ylabel="τ in the engine", xticks=[value for value, _ in item])
        axes.set_title(titles[key], fontsize=10)
    for axes in places[:count]:
        axes.legend(fontsize=7)
        axes.set_ylim(bottom=1)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def curves_of(runs: Cell, changes: dict[str, Cell], keys: tuple[str, ...], unchanged: str) -> dict[str, list[Any]]:
    """Return τ over thousands of tokens, by label, for the first run and those that differ from it only in `keys`."""
    curves = dict[str, list[Any]]()
    for number, (name, run) in enumerate(runs.items()):
        differs = changes[name]
        if number == 0 or (differs and differs.keys() <= {*keys}):
            kind = next((value for key, value in differs.items() if key in ("head", "data.responses")), unchanged)
            sizes = (f"{key}={value}" for key, value in differs.items() if key in ("steps", "batch_size"))
            curves[", ".join((kind, *sizes))] = [(tokens / 1e3, tau) for tokens, tau in run["tau_over_tokens"]]
    return curves


def plot_load(result: Cell, path: Path) -> None:
    """Plot tokens/s and the median times of a response and between tokens over the load, one line per server."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    speeds, times, gaps = figure.subplots(1, 3)
    for system, levels in result["results"].items():
        program = system.partition(":")[0]
        marker = {"server": "o", "vllm": "s", "llama.cpp": "^"}[program]
        style = {"marker": marker, "markersize": 4, "linestyle": "-" if program == "server" else "--"}
        loads = [level["load"] for level in levels]
        speeds.plot(loads, [level["tokens_per_s"] for level in levels], label=label(system), **style)
        times.plot(loads, [level["latency_s"]["p50"] for level in levels], **style)
        gaps.plot(loads, [1000 * level["token_s"]["p50"] for level in levels], **style)
    speeds.set_title("tokens/s", fontsize=10)
    times.set_title("seconds until an answer is whole (median)", fontsize=9)
    gaps.set_title("milliseconds between two tokens (median)", fontsize=9)
    times.set_yscale("log")
    for axes in (speeds, times, gaps):
        axes.set_xlabel("load (1: our plain decoding's capacity)", fontsize=9)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)


TABLES: dict[str, Callable[[Cell], str]] = {
    "shapes": by_temperature,
    "auto-code": by_batch,
    "auto-chat": by_batch,
    "wide-programs": by_program,
    "wide-batches": by_program,
    "wide-64": by_program,
    "wide-fixed": by_program,
    "wide-int8": by_program,
    "wide-int4": by_program,
    "wide-modes": by_program,
    "wide-long": by_program,
    "wide-chat": by_program,
    "1b-programs": by_program,
    "smollm2-programs": by_program,
    "smollm2-int8": by_program,
    "smollm2-int4": by_program,
    "smollm2-head-speeds": by_program,
    "smollm2-sets": by_shape,
    "smollm2-auto": by_batch,
    "smollm2-heads": by_run,
    "smollm2-budget": by_run,
    "served": by_load,
    "packing": by_variant,
}
PLOTS: dict[str, Callable[[Cell, Path], None]] = {
    "served": plot_load,
    "smollm2-heads": plot_curves,
    "smollm2-budget": plot_curves,
}


def rewrite(page: Path) -> str:
    """Return the page's text with every table regenerated. Raises ValueError for an unknown table."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"<!-- table {name} -->: no such table; known: {', '.join(TABLES)}")
        file = newest(name)
        result = json.loads(file.read_text(encoding="utf-8"))
        commit = (result["machine"]["commit"] or "unknown")[:7]
        source = f"[{file.name}]({os.path.relpath(file, page.parent)}), commit {commit}."
        return f"{match[1]}{TABLES[name](result)}\n{source}\n{match[3]}"

    return BLOCK.sub(table, page.read_text(encoding="utf-8"))


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    try:
        pages = {page: rewrite(page) for page in PAGES}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        return int(any(page.read_text(encoding="utf-8") != text for page, text in pages.items()))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    for name, plot in PLOTS.items():
        if any(f"<!-- table {name} -->" in text for text in pages.values()):
            plot(json.loads(newest(name).read_text(encoding="utf-8")), RESULTS / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
