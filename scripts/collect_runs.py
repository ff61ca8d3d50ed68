"""Collects the results of several training runs in one file, for the tables and plots of train/README.md.

    python scripts/collect_runs.py save=curves outputs/base outputs/given outputs/steps-1 gsm8k.json

An argument is the folder of a finished run (train/run.py), or a file whose last line is the JSON document of
scripts/evaluate.py. The first run is the baseline. For each run the document states the keys that differ from the
baseline, τ in the engine over the tokens trained, and the results of its exported head. The document is the last line
of standard output; with save= it is also written to a file.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer import config as infer_config
from infer.options.cli import load_config
from infer.options.exported_heads import export_folder
from scripts.document import TRAINING, describe_machine, publish
from scripts.errors import reports_errors
from scripts.training import read_words
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


def name_of(config: dict[str, Any]) -> str:
    """Return the name of an evaluated head's run: the name of its folder if head.path is set, else the head's name."""
    return Path(config["head"]["path"] or config["head"]["name"]).name


def collect(words: list[str]) -> dict[str, Any]:
    evaluations = [json.loads(Path(word).read_text().splitlines()[-1]) for word in words if word.endswith(".json")]
    folders = [Path(word) for word in words if not word.endswith(".json")]
    if not folders:
        raise ValueError("give the folder of at least one training run")
    runs = {folder.name: read_run(folder) for folder in folders}
    base = next(iter(runs.values()))["settings"]
    settings = {name: run.pop("settings") for name, run in runs.items()}
    for name, run in runs.items():
        run["differs"] = differences(settings[name], base)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "base": {key: value for key, value in base.items() if not key.startswith(NAMES)},
        "runs": runs,
        "evaluations": {name_of(evaluation["config"]): evaluation["results"] for evaluation in evaluations},
    }


@reports_errors
def main() -> int:
    options = {"save": ""}
    report = collect(read_words(__doc__, options))
    publish(report, options["save"], report["base"]["model.name"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
