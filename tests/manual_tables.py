"""Generates the tables of README.md, docs/ and the manuals from the newest result files, so no number is typed by hand.

    python -m tests.manual_tables            # rewrites the text between <!-- table NAMES --> and <!-- end -->
    python -m tests.manual_tables --check    # only says by its exit code, 1, if something would change

A name is what a result was saved under: `python scripts/bench.py ... save=NAME` writes scripts/results/NAME-*.json.
Several names, with spaces between, are comparisons in one table, of one target at other numbers of requests. Results of
several levels of processors become a table each, whose caption names the level, and whether it was lowered by
HEADWAY_CPU_LEVEL; a machine's own level is preferred to that. A level after the names, as in `NAMES:avx512`, selects
its table. The names in FROM_CODE are tables of lists in the code. The files in PAGES are rewritten.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infer.json_schema import keywords
from infer.settings.paths import REPO_ROOT
from kernels.cpu.level import LEVELS, SWITCH
from scripts.benchmarks.comparison.systems import is_ours
from scripts.benchmarks.document import RESULTS, markdown

LEVEL_NAMES = {"avx2": "AVX2", "avx512": "AVX-512", "amx": "AVX-512 and AMX"}
FOLDERS = ("", "train", "infer", "infer/server", "models", "scripts")
PAGES = (
    *(REPO_ROOT / folder / "README.md" for folder in FOLDERS),
    REPO_ROOT / "docs" / "benchmarks.md",
)
BLOCK = re.compile(r"(<!-- table ([\w-]+(?: [\w-]+)*(?::\w+)?) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "off": "plain",
    "ngram": "n-gram lookup",
    "suffix": "suffix decoding",
    "draft_model": "draft model",
    "hf": "transformers",
    "hf_lookup": "transformers, prompt lookup",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
}
PROGRAMS, OURS = "smollm2-programs", "head:auto5"  # the front page's result, and its system that stands for us
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
        raise ValueError(f"scripts/results/{name}-*.json: no such file; make it with scripts/bench.py ... save={name}")
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


def label(system: str) -> str:
    """`head:tree16` -> "head, tree 16"; `vllm:ngram` -> "vLLM, n-gram lookup"."""
    name, *rest = system.split(":")
    words = (SOURCES.get(word) or numbered(word) for word in rest)
    return ", ".join((NAMES.get(name, name), *words))


def numbered(shape: str) -> str:
    """`tree16` -> "tree 16"."""
    return re.sub(r"(\D+)(\d+)", r"\1 \2", shape)


def speed(cell: Cell) -> float:
    """Return tokens per second."""
    return cell["tokens_per_s"]["median"]


def ratio(cell: Cell) -> str:
    return f"{cell['ratio']['median']:.2f}"


def length(cell: Cell) -> str:
    return "1" if cell["acceptance_length"] is None else f"{cell['acceptance_length']:.2f}"


def shares(cell: Cell) -> str:
    """Return the acceptance rate by position in the draft."""
    return " ".join(f"{share:.2f}" for share in cell["by_position"])


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
        speeds = ("" if cell is None else f"{speed(cell):.0f} ({ratio(cell)})" for cell in measured)
        rows.append([label(system), *speeds, lengths, equal])
    return markdown(["", *(f"tokens/s at {count}" for count in levels), "τ", "same answers"], rows)


def of_several(results: list[Cell]) -> str:
    """Return one table of several comparisons of one target, at several concurrencies."""
    merged = {temperature: dict[str, Cell]() for temperature in results[0]["results"]}
    for result in results:
        for temperature, levels in result["results"].items():
            merged[temperature] |= levels
    ordered = {
        temperature: dict(sorted(levels.items(), key=lambda item: int(item[0])))
        for temperature, levels in merged.items()
    }
    return by_program({"results": ordered})


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
            rows.append([temperature, count, f"{speed(cells['off']):.0f}", varies, *entries])
    titles = (title for system in others for title in (f"{label(system)}: ratio", "τ"))
    return markdown(["T", "requests at once", "plain, tokens/s", "plain again: ratio", *titles], rows)


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
            rows.append([numbered(shape), data, *values, shares(first), f"{100 * first['coverage']:.1f} %"])
        means = (f"**{sum(column) / len(sets):.2f}**" for column in zip(*taus.values(), strict=True))
        rows.append([numbered(shape), "**mean**", *means, "", ""])
    header = ["drafts", "data", *(f"τ, T = {t:g}" for t in temperatures), "accepted by position", "coverage"]
    return markdown(header, rows) + f"\nIds equal to plain decoding's: {all_or_not(result['results'])}.\n"


def by_training(result: Cell) -> str:
    """Return a table of a comparison of training with one row per system; memory is the process's peak."""
    rows = [
        [
            name,
            f"{cell['tokens_per_s']:.0f}",
            f"{cell['ratio']:.2f} ({' to '.join(f'{ratio:.2f}' for ratio in cell['ratio_from_to'])})",
            f"{cell['memory_gb']:.2f}",
            f"{cell['tokens_per_update']:.0f}",
        ]
        for name, cell in result["results"].items()
    ]
    return markdown(["", "tokens/s", "ratio", "memory, GB", "tokens an update"], rows)


def best_peer(cells: Mapping[str, Cell]) -> str:
    """Return the fastest system of another program. Raises ValueError if there is none."""
    peers = [name for name in cells if not is_ours(name)]
    if not peers:
        raise ValueError(f"{', '.join(cells)}: no system of another program, so none is the fastest of them")
    return max(peers, key=lambda name: speed(cells[name]))


def by_best_peer(result: Cell) -> str:
    """Return a table with a column for every concurrency: our speed, the best other program's with its name, and the
    ratio of both.
    """
    (levels,) = result["results"].values()
    best = {count: best_peer(cells) for count, cells in levels.items()}
    ours = [f"**{speed(cells[OURS]):.0f}**" for cells in levels.values()]
    others = [f"{speed(levels[count][name]):.0f} ({label(name)})" for count, name in best.items()]
    times = [f"{speed(levels[count][OURS]) / speed(levels[count][name]):.1f}" for count, name in best.items()]
    header = ["tokens/s", *("1 request" if count == "1" else f"{count} requests" for count in levels)]
    rows = ["Headway", *ours], ["the fastest other program", *others], ["times as fast", *times]
    return markdown(header, rows)


def newest_programs() -> Cell:
    """Return the result that the front page shows. Raises ValueError for several levels of processors, or no file."""
    files = newest_by_level(PROGRAMS)
    if len(files) > 1:
        raise ValueError(
            f"scripts/results/{PROGRAMS}-*.json: {' and '.join(map(str, files))}; the front page shows one"
        )
    return json.loads(*(file.read_text(encoding="utf-8") for file in files.values()))


FROM_CODE = {"json-schema-keywords": keywords.table, "best-peers": lambda: by_best_peer(newest_programs())}


def table_of(result: Cell) -> str:
    """Return the table that fits a result: by what its script measured and what that varied."""
    if isinstance(result["results"], list):
        return by_shape(result)
    if "comparison" in result:
        return by_training(result)
    if result["config"]["never_slower"] is not None:
        return by_batch(result)
    return by_program(result) if len(result["results"]) == 1 else by_system(result)


def rewrite(page: Path) -> str:
    """Return the page's text with every table regenerated. Raises ValueError for a table without a result file."""

    def table(match: re.Match[str]) -> str:
        names, _, level = match[2].partition(":")
        text = FROM_CODE[names]() if names in FROM_CODE else blocks(names.split(), page.parent, level)
        return f"{match[1]}{text}{match[3]}"

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


def describe_level(machine: Mapping[str, Any]) -> str:
    """Return the caption of a table that was measured on a machine of `describe_machine`."""
    on = f"{machine['cpu']}, {machine['cores']} cores"
    name = LEVEL_NAMES.get(machine["level"], machine["level"])
    return f"{name}: {SWITCH}={machine['level']} on {on}" if machine["lowered"] else f"{name}: {on}"


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


def main(words: list[str]) -> int:
    pages = {page: rewrite(page) for page in PAGES}
    changed = [page for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    if "--check" in words:
        return int(bool(changed))
    for page in changed:
        page.write_text(pages[page], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
