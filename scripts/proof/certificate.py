"""The certificate of a proof: a JSON-ready record of what was tried on what, and the verdict in words."""

from __future__ import annotations

import datetime
import hashlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infer.options.exported_heads import head_folder
from models.targets import resolve_checkpoint
from scripts.benchmarks.document import describe_machine, without_folders
from scripts.proof.cases import Difference
from scripts.proof.config import ProveConfig
from scripts.proof.engines import Engines
from scripts.proof.matrix import Cell
from scripts.proof.situations import SITUATIONS
from train.storage.provenance import versions

EQUAL, DIFFERENT, IDLE = "equal", "different", "not exercised"
NEVER = "another dtype, thread count, machine or version; the server in front of the engine; requests that are aborted"
SUFFIXES = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth", ".model", ".jinja", ".txt")


def verdict_of(cell: Cell, difference: Difference | None, counts: Mapping[str, int]) -> tuple[str, str]:
    """Return the result of a cell, and what differs or why it was not exercised."""
    if difference is not None:
        return DIFFERENT, str(difference)
    if counts["failures"]:
        return IDLE, f"the proposer of {counts['failures']} requests failed, and they were decoded plainly; see the log"
    siblings = ("siblings",) if "tree" in cell.drafts else ()
    absent = [n for n in ("accepted", "rejected", *siblings, *SITUATIONS[cell.situation].shows) if not counts[n]]
    return (IDLE, f"nothing was {' or '.join(absent)}") if absent else (EQUAL, "")


@dataclass
class Certificate:
    config: ProveConfig
    target: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # what differs
    cells: list[dict[str, Any]] = field(default_factory=list)
    not_covered: dict[str, str] = field(default_factory=dict)  # cell, drafts or situation -> why
    acceptance: dict[str, dict[str, Any]] = field(default_factory=dict)  # by drafts
    speed: list[dict[str, Any]] = field(default_factory=list)
    unfinished: str = "the run has not ended"  # why parts are missing; "" once all are there

    def add(self, cell: Cell, difference: Difference | None, counts: Mapping[str, int], repeat: str | None) -> None:
        result, why = verdict_of(cell, difference, counts)
        self.cells.append({**cell._asdict(), "result": result, "why": why, "counts": counts, "repeat": repeat})
        self.faults += [f"{cell}: {why}"] if difference is not None else []

    def counted(self, result: str) -> int:
        return sum(cell["result"] == result for cell in self.cells)

    @property
    def verdict(self) -> str:
        found, equal, idle = len(self.faults), self.counted(EQUAL), self.counted(IDLE)
        said = f"No token and no log-probability differs in {equal} cell{'s' if equal > 1 else ''}"
        said = f"Nothing is shown: {idle} cells were run, and none" if not equal else said
        said += f"; {idle} not exercised" if equal and idle else " was exercised" if not equal else ""
        said = f"{found} difference{'s' if found > 1 else ''} found" if found else said
        return f"{said}.{f' Incomplete: {self.unfinished}.' if self.unfinished else ''}"

    def record(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("config", "unfinished")}
        return {
            "verdict": self.verdict,
            "complete": not self.unfinished,
            "counted": {result: self.counted(result) for result in (EQUAL, DIFFERENT, IDLE)},
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", "scripts/prove.py", *sys.argv[1:]]),
            "machine": describe_machine(),
            "versions": versions(),
            **own,
            "never_tried": NEVER,
            "config": without_folders(asdict(self.config)),
        }


def identify(config: ProveConfig, engines: Engines) -> dict[str, Any]:
    """Return what is tried: files of target and head by their SHA-256, and where they are computed with."""
    checkpoint, target = resolve_checkpoint(config.model.path_or_hub_id, config.model.revision), engines.parts.target
    head, weight = engines.parts.head, target.norm.weight
    folder = None if head is None else head_folder(config.head, config.output_dir, config.model)
    return {
        "name": config.model.name,
        "fingerprint": target.fingerprint,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "files": hashes(checkpoint),
        "head": head and head.config.name,
        "head_files": {} if folder is None else hashes(folder),
    }


def hashes(place: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of a checkpoint's files in a folder, by name."""
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES) if place.is_dir() else [place]
    result = {}
    for file in files:
        with file.open("rb") as content:
            result[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return result
