"""Sequences that another run has made already, where they are exactly what this run would make.

What the target writes is a function of the target, the prompts and how they are continued, not of the head that is
trained on it; so several heads trained under one `output_dir` need it written once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from models.targets.llama import LlamaTarget
from train import atomic
from train.config import TrainConfig

RECIPE = "recipe"
WITHOUT_EFFECT = ("concurrency", "retries", "timeout_s")  # of data, on what is written


def recipe(config: TrainConfig, target: LlamaTarget, source: str) -> str:
    """A hash over all that the sequences of both splits depend on. `source` names the prompts and their content."""
    data = {key: value for key, value in asdict(config.data).items() if key not in WITHOUT_EFFECT}
    parts = {
        "target": target.fingerprint,
        "dtype": config.model.dtype,
        "source": source,
        "data": data,
        "seed": config.seed,
        "held out": [config.eval_prompts, config.eval_max_tokens],
        "exact": config.engine.exact,
        **({} if config.engine.weights == "same" else {"weights": config.engine.weights}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def find_twin(runs: Path, wanted: str, record: str, files: Sequence[str]) -> Path | None:
    """The data folder `runs/*/data` that holds all of `files` and whose JSON file `record` names this recipe."""
    for path in sorted(runs.glob(f"*/data/{record}")):
        if not all((path.parent / name).is_file() for name in files):
            continue
        try:
            known = json.loads(path.read_text(encoding="utf-8")).get(RECIPE)
        except (OSError, ValueError):
            continue  # another run's damage is not this run's
        if known == wanted:
            return path.parent
    return None


def copy_twin(twin: Path, folder: Path, files: Sequence[str]) -> None:
    """The last of `files` marks the whole: it appears when all others are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        atomic.copy_file(twin / name, folder / name)
