"""Collects several training runs as one result, for the tables and plots of train/README.md.

    python scripts/bench.py runs runs=[outputs/base,outputs/probe-*] save=curves

`runs` are folders of finished runs (train/run.py), or patterns of them. The first is the baseline. For each run the
document states the keys that differ from the baseline, τ in the engine over the tokens trained, and the results of its
exported head.
"""

from __future__ import annotations

import datetime
import glob
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer import config as infer_config
from infer.options.cli import entry_point, load_config
from infer.options.exported_heads import export_folder
from infer.options.paths import resolve_path
from scripts.benchmarks.config import RunsConfig
from scripts.benchmarks.document import TRAINING, describe_machine, publish
from train import config as train_config
from train.config import TrainConfig
from train.publishing.trackers import read_metrics
from train.storage.run_folder import CONFIG, flatten

NAMES = (
    "run", "head.path", "output_dir", "overwrite", "log_every", "eval_every", "checkpoint_every", "features.path",
    "features.target", "data.root", "tracker.",
)  # fmt: skip


def read_run(folder: Path) -> dict[str, Any]:
    """Return settings, metrics and provenance of a run. Raises ValueError for a folder without a finished run."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no {CONFIG}; give the folder of a training run")
    schemas = {**infer_config.SCHEMAS, **train_config.SCHEMAS}
    config = load_config(folder / CONFIG, TrainConfig, schemas)
    head = export_folder(config.head, config.output_dir, config.model.name)
    path = head / "provenance.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if record.get("run") != config.run:
        raise ValueError(f"{folder}: {path} is not of this run; it has not finished, or another has its head.path")
    return {
        "settings": flatten(asdict(config)),
        **{key: record[key] for key in TRAINING},
        "draft_vocab_size": json.loads((head / "config.json").read_text(encoding="utf-8")).get("draft_vocab_size"),
        "data_hash": record["data_hash"],
        "data": record["data_counts"],
        "commit": record["git"]["commit"],
        **curves(read_metrics(folder), record["steps"]),
    }


def curves(rows: list[dict[str, float]], exported: int) -> dict[str, Any]:
    """Return τ in the engine over tokens, and coverage and acceptance by position of the head exported at `exported`.

    Raises ValueError if an evaluated step was not logged.
    """
    tokens = {0: 0.0}
    points, last = [], dict[str, float]()
    for row in rows:
        if "train/tokens" in row:
            tokens[int(row["step"])] = row["train/tokens"]
        if "eval/tau_engine" in row:
            if int(row["step"]) not in tokens:
                raise ValueError(
                    f"step {row['step']} was evaluated and not logged: make eval_every a multiple of log_every"
                )
            points.append([int(tokens[int(row["step"])]), round(row["eval/tau_engine"], 4)])
            last = row if row["step"] <= exported else last
    by_position = [round(last[key], 4) for key in sorted(key for key in last if key.startswith("eval/acceptance_"))]
    return {"tau_over_tokens": points, "by_position": by_position, "coverage": round(last["eval/coverage"], 4)}


def differences(settings: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the keys whose values differ from `base`, without NAMES; keys that `base` lacks are left out, so another
    head or objective shows as its name and the keys that both have.
    """
    changed = {key: value for key, value in settings.items() if key in base and base[key] != value}
    return {key: value for key, value in changed.items() if not key.startswith(NAMES)}


def collect(folders: list[Path]) -> dict[str, Any]:
    """Return the document of training runs. Raises ValueError for a folder without a finished one."""
    runs = {folder.name: read_run(folder) for folder in folders}
    base = next(iter(runs.values()))["settings"]
    for run in runs.values():
        run["differs"] = differences(run.pop("settings"), base)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "base": {key: value for key, value in base.items() if not key.startswith(NAMES)},
        "runs": runs,
    }


@entry_point("runs", RunsConfig)
def main(config: RunsConfig) -> None:
    if not config.runs:
        raise ValueError("runs=[]: give the folder of at least one training run")
    patterns = [str(resolve_path(pattern)) for pattern in config.runs]
    folders = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]
    report = collect(folders)
    publish(report, config.save, report["base"]["model.name"])
