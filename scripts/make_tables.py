"""Generates the tables of README.md, docs/ and the manuals from the newest result files, so no number is typed by hand.

    python scripts/make_tables.py            # rewrites the text between <!-- table NAMES --> and <!-- end -->
    python scripts/make_tables.py --check    # only checks whether something would change; exit code 1 if so

A name is what a result was saved under: `python scripts/bench.py ... save=NAME` writes scripts/results/NAME-*.json.
Several names, with spaces between, are benches in one table: of one target at other numbers of requests, or of several
targets. Results of several levels of processors become a table each, whose caption names the level, and whether it was
lowered by HEADWAY_CPU_LEVEL; a machine's own level is preferred to that. A level after the names, as in `NAMES:avx512`,
selects its table. The files in PAGES are rewritten. The plots of tables are redrawn too, next to the result files.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from infer.options.paths import REPO_ROOT
from kernels.cpu.level import LEVELS
from scripts.document import RESULTS, by_format, describe_level, markdown
from scripts.errors import reports_errors

FOLDERS = ("", "train", "infer", "infer/server", "models", "scripts")
PAGES = (*(REPO_ROOT / folder / "README.md" for folder in FOLDERS), REPO_ROOT / "docs" / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table ([\w-]+(?: [\w-]+)*(?::\w+)?) -->\n).*?(<!-- end -->)", re.DOTALL)
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


def newest_by_level(name: str) -> dict[str | None, Path]:
    """Return the result files of that name by level, highest first: of each level the latest, lowered ones only if it
    has no other. Files that name no level are older than levels: they count (None) if there is nothing else.

    `auto` is also how the file of `auto-code` begins, whose longer name counts as a part of the target's. Raises
    ValueError if there is no file.
    """
    files = list(RESULTS.glob(f"{name}-*.json"))
    if not files:
        raise ValueError(f"scripts/results/{name}-*.json: no such file; make it with scripts/bench.py save={name}")
    shortest = min(len(file.stem.rsplit("_", 2)[0]) for file in files)
    by_level = dict[str | None, list[tuple[bool, str, Path]]]()
    for file in files:
        named, _, date = file.stem.rsplit("_", 2)
        if len(named) == shortest:
            machine = json.loads(file.read_text(encoding="utf-8"))["machine"]
            entry = (not machine.get("lowered", False), date, file)
            by_level.setdefault(machine.get("level"), []).append(entry)
    levels = [level for level in reversed(LEVELS) if level in by_level] or [None]
    return {level: max(by_level[level])[-1] for level in levels}


def newest(name: str) -> Path:
    """Return the result file of that name of the highest level. Raises ValueError if there is none."""
    return next(iter(newest_by_level(name).values()))


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


def shares(cell: Cell) -> str:
    """Return the acceptance rate by position in the draft."""
    return " ".join(f"{share:.2f}" for share in cell["by_position"])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def all_or_not(cells: Iterable[Cell]) -> str:
    """Return whether the token ids of all cells equal those of plain decoding."""
    return "all" if all(cell["identical"] for cell in cells) else "NOT ALL"


def by_system(result: Cell) -> str:
    """Return a table with one row per system: τ and the ratio to plain decoding for each temperature, at the first
    concurrency.
    """
    grid = {temperature: next(iter(cells.values())) for temperature, cells in result["results"].items()}
    header = ["drafts", *(f"T = {t}: {column}" for t in grid for column in ("τ", "ratio"))]
    systems = next(iter(grid.values()))
    rows = (
        [label(name), *(text(cells[name]) for cells in grid.values() for text in (length, ratio))] for name in systems
    )
    return markdown(header, rows)


def by_program(result: Cell) -> str:
    """Return a table with one row per system: speed and ratio to plain decoding for every concurrency, τ, and how many
    responses equal those of plain decoding.
    """
    (levels,) = result["results"].values()
    rows = []
    for system in next(iter(levels.values())):
        measured = [level.get(system) for level in levels.values()]
        cells = [cell for cell in measured if cell is not None]
        same, total = (sum(cell["agreement"][i] for cell in cells if cell["agreement"]) for i in (0, 1))
        equal = f"{same} of {total}" if total else all_or_not(cells)
        lengths = " / ".join(length(cell) for cell in cells if cell["acceptance_length"] is not None)
        speeds = ("" if cell is None else f"{speed(cell)} ({ratio(cell)})" for cell in measured)
        rows.append([label(system), *speeds, lengths, equal])
    return markdown(["", *(f"tokens/s at {count}" for count in levels), "τ", "same answers"], rows)


def by_target(results: list[Cell]) -> str:
    """Return a table with one row per target and concurrency, and one column per system: its speed, and the ratio to
    plain decoding of the same target.
    """
    rows, systems = [], list(dict.fromkeys(system for result in results for system in result["config"]["systems"]))
    for result in results:
        (levels,) = result["results"].values()
        name = Path(result["target"]["path"] or result["config"]["model"]["name"]).stem
        for count, cells in levels.items():
            measured = (cells.get(system) for system in systems)
            rows.append([name, count, *("" if cell is None else f"{speed(cell)} ({ratio(cell)})" for cell in measured)])
    return markdown(["target", "at once", *map(label, systems)], rows)


def of_several(results: list[Cell]) -> str:
    """Return one table of several benches: of one target at several concurrencies, or of several targets."""
    if len({result["target"]["fingerprint"] for result in results}) > 1:
        return by_target(results)
    merged = {temperature: dict[str, Cell]() for temperature in results[0]["results"]}
    for result in results:
        for temperature, levels in result["results"].items():
            merged[temperature] |= levels
    ordered = {
        temperature: dict(sorted(levels.items(), key=lambda item: int(item[0])))
        for temperature, levels in merged.items()
    }
    return by_program({"results": ordered})


def by_load(result: Cell) -> str:
    """Return a table with one row per server: for each load tokens/s and the median time of a whole response, which is
    a lower bound (≥) where requests were dropped.
    """

    def level(entry: Cell) -> str:
        bound = "≥ " if entry["unfinished"] else ""
        return f"{entry['tokens_per_s']:.0f}, {bound}{entry['latency_s'].get('p50', 0.0):.2f} s"

    rows = ([label(system), *map(level, levels)] for system, levels in result["results"].items())
    loads = [entry["load"] for entry in next(iter(result["results"].values()))]
    return markdown(["", *(f"load {load:g}" for load in loads)], rows)


def by_variant(result: Cell) -> str:
    """Return a table with one row per head: the speed of both training variants, their ratio, MFU and memory."""
    rows, heads = [], result["heads"]
    for head in [name for name in heads if f"{name}-against" in heads]:
        runs = [heads[name] for name in (head, f"{head}-against")]
        speeds = [f"{run['tokens_per_s']:,.0f} ({run['low']:,.0f} to {run['high']:,.0f})" for run in runs]
        gain = f"**{runs[0]['tokens_per_s'] / runs[1]['tokens_per_s']:.2f}**"
        used = " / ".join(f"{100 * run['mfu']:.0f} %" for run in runs)
        memory = " / ".join(f"{run['memory_gb']:.2f}" for run in runs)
        rows.append([head, *speeds, gain, used, memory])
    against = ", ".join(result["against"].split(","))
    return markdown(["head", "tokens/s", f"with {against}", "ratio", "MFU", "GB"], rows)


def by_batch(result: Cell) -> str:
    """Return a table with one row per temperature and concurrency: the speed of plain decoding and its variation, and
    for every other system the ratio to plain decoding and τ.
    """
    rows, others = [], list[str]()
    for temperature, levels in result["results"].items():
        for count, cells in levels.items():
            others = [system for system in cells if system not in ("off", "off:again")]
            again = cells.get("off:again", cells["off"])["ratio"]
            entries = (text for system in others for text in (f"**{ratio(cells[system])}**", length(cells[system])))
            varies = f"{again['low']:.2f} to {again['high']:.2f}"
            rows.append([temperature, count, speed(cells["off"]), varies, *entries])
    titles = (title for system in others for title in (f"{label(system)}: ratio", "τ"))
    return markdown(["T", "requests at once", "plain, tokens/s", "plain again: ratio", *titles], rows)


def by_run(result: Cell) -> str:
    """Return a table with one row per training run, and one of the evaluations.

    A run's row has the keys that differ from the first run, tokens trained, τ, acceptance by position and coverage.
    """
    rows = []
    for name, run in result["runs"].items():
        lengths = (run[key]["engine"] for key in ("acceptance_length", "acceptance_length_sampled"))
        taus = ("undefined" if length is None else f"{length:.2f}" for length in lengths)
        differs = " ".join(f"`{key}={value}`" for key, value in described(run["differs"]).items())
        rows.append([name, differs, f"{run['tokens']:,}", " / ".join(taus), shares(run), percent(run["coverage"])])
    header = ["run", "differs in", "tokens", "τ, T = 0 / T = 1", "accepted by position, T = 0", "coverage"]
    return markdown(header, rows) + by_data_set(result["evaluations"])


def by_shape(result: Cell) -> str:
    """Return a table of an evaluation with one row per draft shape and data set, and one for the mean over data sets.

    τ is listed for every temperature, acceptance by position and coverage of the draft vocabulary for the first.
    """
    cells = {(cell["shape"], cell["data"], cell["temperature"]): cell for cell in reversed(result["results"])}
    shapes, sets, temperatures = (
        list(dict.fromkeys(cell[key] for cell in result["results"])) for key in ("shape", "data", "temperature")
    )
    rows = []
    for shape in shapes:
        taus = {data: [cells[shape, data, t]["acceptance_length"] for t in temperatures] for data in sets}
        for data in sets:
            first = cells[shape, data, temperatures[0]]
            values = (f"{tau:.2f}" for tau in taus[data])
            rows.append([numbered(shape), data, *values, shares(first), percent(first["coverage"])])
        means = (f"**{sum(column) / len(sets):.2f}**" for column in zip(*taus.values(), strict=True))
        rows.append([numbered(shape), "**mean**", *means, "", ""])
    header = ["drafts", "data", *(f"τ, T = {t:g}" for t in temperatures), "accepted by position", "coverage"]
    return markdown(header, rows) + f"\nIds equal to plain decoding's: {all_or_not(result['results'])}.\n"


def by_data_set(evaluations: dict[str, list[Cell]]) -> str:
    """Return a table of τ with one row per evaluated head and one column per data set and temperature."""
    if not evaluations:
        return ""
    heads = {name: {key_of(cell): cell for cell in cells} for name, cells in evaluations.items()}
    keys = list(dict.fromkeys(key for by_key in heads.values() for key in by_key))
    rows = []
    for name, by_key in heads.items():
        taus = (f"{by_key[key]['acceptance_length']:.2f}" if key in by_key else "" for key in keys)
        rows.append([name, *taus, "yes" if all(cell["identical"] for cell in by_key.values()) else "NO"])
    return "\n" + markdown(["τ", *keys, "ids of plain decoding"], rows)


def key_of(cell: Cell) -> str:
    return f"{cell['data']}, T = {cell['temperature']:g}"


def described(differs: Cell) -> Cell:
    """Return the differences, or only the name if the head differs: the other differences follow from that."""
    return {"head": differs["head.name"]} if "head.name" in differs else differs


def table_of(result: Cell) -> str:
    """Return the table that fits a result: by what its script measured and what that varied."""
    if "runs" in result:
        return by_run(result)
    if "capacity" in result:
        return by_load(result)
    if "formats" in result:
        return by_format(result)
    if "results" not in result:
        return by_variant(result)
    if isinstance(result["results"], list):
        return by_shape(result)
    if result["config"]["never_slower"] is not None:
        return by_batch(result)
    return by_program(result) if len(result["results"]) == 1 else by_system(result)


def plot_curves(result: Cell, path: Path) -> None:
    """Plot τ over the tokens trained, by head and by whether responses come from the target or from the data.

    Further panels show the final τ over the steps of training-time test and over the size of the draft vocabulary, if
    runs differ in these.
    """
    from train.publishing.plots import Panel, draw

    base, runs = result["base"], result["runs"]
    first = next(iter(runs))
    changes: dict[str, Cell] = {name: described(item["differs"]) for name, item in runs.items()}
    groups = {
        "heads": curves_of(runs, changes, ("head", "steps", "batch_size"), base["head.name"]),
        "responses of the target or of the data": curves_of(
            runs, changes, ("data.responses",), base.get("data.responses", first)
        ),
    }
    panels = [
        Panel(curves, "thousand tokens trained", "τ in the engine, greedy", title, axes={"ylim": (1, None)})
        for title, curves in groups.items()
        if len(curves) > 1 or title == "heads"
    ]
    sizes = {  # by key: title, and a function from a run's name to its value of that key
        "objective.steps": (
            "steps of training-time test (K)",
            lambda name: changes[name].get("objective.steps", base["objective.steps"]),
        ),
        "head.draft_vocab_size": ("tokens that the head can draft", lambda name: runs[name]["draft_vocab_size"]),
    }
    for key, (title, size_of) in sizes.items():
        ends = sorted((size_of(name), name) for name in runs if name == first or changes[name].keys() == {key})
        if len(ends) > 1:
            curves = {
                curve: [(value, runs[name][measured]["engine"]) for value, name in ends]
                for measured, curve in (
                    ("acceptance_length", "greedy"),
                    ("acceptance_length_sampled", "temperature 1"),
                )
            }
            axes = {"ylim": (1, None), "xticks": [value for value, _ in ends]}
            panels.append(Panel(curves, key, "τ in the engine", title, axes=axes))
    draw(path, *panels, columns=min(2, len(panels)))


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
    from train.publishing.plots import Panel, draw

    values: dict[str, Callable[[Cell], float]] = {
        "tokens/s": lambda level: level["tokens_per_s"],
        "seconds until a response is complete (median)": lambda level: level["latency_s"].get("p50", math.nan),
        "milliseconds between two tokens (median)": lambda level: 1000 * level["token_s"].get("p50", math.nan),
    }
    panels = []
    for number, (title, value) in enumerate(values.items()):
        curves = {
            label(system): [(level["load"], value(level)) for level in levels]
            for system, levels in result["results"].items()
        }
        axes = {"yscale": "log"} if number == 1 else {}
        panels.append(Panel(curves, "load (1: our plain decoding's capacity)", "", title, axes=axes))
    draw(path, *panels, columns=3)


PLOTS: dict[str, Callable[[Cell, Path], None]] = {
    "served": plot_load,
    "smollm2-heads": plot_curves,
    "smollm2-budget": plot_curves,
}


def rewrite(page: Path) -> str:
    """Return the page's text with every table regenerated. Raises ValueError for a table without a result file."""

    def table(match: re.Match[str]) -> str:
        names, _, level = match[2].partition(":")
        return f"{match[1]}{blocks(names.split(), page.parent, level)}{match[3]}"

    return BLOCK.sub(table, page.read_text(encoding="utf-8"))


def blocks(names: list[str], folder: Path, level: str = "") -> str:
    """Return a table of the results of these names for every level that all have, with links from `folder`.

    With `level` only that one's. Raises ValueError for a name without a file, and if they have no level in common.
    """
    files = [newest_by_level(name) for name in names]
    common = [name for name in files[0] if all(name in of_name for of_name in files)]
    levels = [name for name in common if level in ("", name)]
    if not levels:
        which = f"level {level} has no" if level else "no level of processors has"
        raise ValueError(f"table {' '.join(names)}: {which} results of all of them")
    return "\n".join(block([of_name[name] for of_name in files], folder) for name in levels)


def block(files: list[Path], folder: Path) -> str:
    """Return one table of the results in `files`, of one level, with its caption and links to them."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    sources = ""
    for file, result in zip(files, results, strict=True):
        commit = (result["machine"]["commit"] or "unknown")[:7]
        sources += f"[{file.name}]({os.path.relpath(file, folder)}), commit {commit}.\n"
    machine = results[0]["machine"]
    caption = f"{describe_level(machine)}\n\n" if machine.get("level") else ""
    text = table_of(results[0]) if len(results) == 1 else of_several(results)
    return f"{caption}{text}\n{sources}"


@reports_errors
def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    pages = {page: rewrite(page) for page in PAGES}
    if check:
        return int(any(page.read_text(encoding="utf-8") != text for page, text in pages.items()))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
        for name in PLOTS:
            if f"<!-- table {name} -->" in text:
                PLOTS[name](json.loads(newest(name).read_text(encoding="utf-8")), RESULTS / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
