"""Asks servers that run elsewhere, and writes what their answers to the same prompts show: JSON and a page."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from tqdm import tqdm

from infer.settings.paths import resolve_path, short
from scripts.benchmarks.document import without_folders
from scripts.proof.config import ProveConfig
from scripts.proof.mix import digest
from scripts.proof.page import document, table
from scripts.proof.servers.answers import Address, measure, read_prompts, sides_of, summary

HEADER = (
    *("sampling", "drafts", "clients", "answers", "part", "at token", "rest that differs", "log-probability there"),
    *("other log-probabilities", "by up to", "drafted", "accepted", "failed", "result"),
)


def ask_servers(config: ProveConfig, until: float) -> None:
    """Measure until the time `until` and write the certificate, also after Ctrl-C.

    Raises ValueError for servers that do not answer, SystemExit with 1 if an answer differs or nothing is shown.
    """
    prompts = read_prompts(config)
    sides = sides_of(config)
    for address in sides.values():
        address.agree(prompts[0])
    for name in ("extras", "unit"):  # what both say is compared
        if len({str(getattr(address, name)) for address in sides.values()}) > 1:
            raise ValueError(f"servers={config.servers}: they differ in what they return: {described(sides)}")
    cells, unfinished = list[dict[str, Any]](), "it was interrupted"
    try:
        with tqdm(unit="cell", total=2 * len(sides) * len(set(config.requests)), disable=None) as bar:
            for cell in measure(sides, prompts, config, until, bar.set_description):
                cells.append(cell)
                bar.update()
        unfinished = "" if len(cells) == bar.total else "the time was up"
    finally:
        write(config, sides, prompts, cells, unfinished)
    if any(cell["result"] == "different" for cell in cells) or not any(cell["result"] == "equal" for cell in cells):
        raise SystemExit(1)


def described(sides: Mapping[str, Address]) -> dict[str, str]:
    return {
        side: f"{address.model} at {address.url}: {', '.join((address.unit, *address.extras))}"
        for side, address in sides.items()
    }


def write(
    config: ProveConfig, sides: Mapping[str, Address], prompts: Sequence[Any], cells: Sequence[Any], unfinished: str
) -> None:
    model = next(iter(sides.values())).model
    folder = resolve_path(config.output_dir) / "proofs" / re.sub(r"[^\w.-]+", "-", f"server-{model.rpartition('/')[2]}")
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "said": [*summary(cells), *([f"Incomplete: {unfinished}"] if unfinished else [])],
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "scripts/prove.py", *sys.argv[1:]]),
        "servers": described(sides),
        "prompts": {"count": len(prompts), "sha256": digest(prompts)},
        "cells": cells,
        "config": without_folders({key: value for key, value in vars(config).items() if not is_dataclass(value)}),
    }
    (folder / "servers.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "servers.html").write_text(page(record), encoding="utf-8")
    print("\n".join(record["said"]))
    print(f"certificate: {short(folder / 'servers.html')} and .json", flush=True)


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record of `write`."""
    bad = any(cell["result"] != "equal" for cell in record["cells"])
    facts = {**record["servers"], "prompts": record["prompts"], "command": record["command"], "date": record["date"]}
    parts = [
        table(["what", "which"], facts.items()),
        "<h2>Each answer beside that of the first server to one client without drafts</h2>",
        table(HEADER, map(row_of, record["cells"])),
    ]
    return document("Answers of servers, alone and together", record["said"], parts, bad=bad)


def row_of(cell: Mapping[str, Any]) -> list[Any]:
    """Return the texts of a cell under HEADER."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        *(cell[key] for key in ("sampling", "side", "clients", "answers", "parted")),
        text(cell["place"], ".0f"),
        text(cell["rest"], ".0%"),
        text(cell["gap"], ".2g"),
        cell["other_logprobs"],
        text(cell["noise"], ".2g"),
        *(text(cell[key], "d") for key in ("drafted", "accepted")),
        cell["failed"],
        cell["result"],
    ]
