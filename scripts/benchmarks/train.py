"""Measures how fast, and in how much memory, a head is trained here and by speculators, on the same rows.

    python scripts/bench.py train model=demo head=eagle3 systems=[headway,headway:again]
    python scripts/bench.py train model=smollm2-135m head=eagle3 head.draft_vocab_size=8192 data=files \
        data.path=books.jsonl data.responses=given batch_size=1 sequence_length=2048 \
        systems=[headway,speculators:1x2048:eager,speculators:1x1024:sdpa]

`headway` is train/run.py with the keys of the command line and those of ALWAYS; its first run, which is not measured,
makes the rows, their features, and the head that the others start from. `speculators:1x1024:sdpa` is that library's own
trainer (tests/peers/speculators_train.py) in its own environment: it trains the same head in updates of one row of up
to 1,024 tokens, into which the rows are cut, with that attention. A run's first update is its warm-up. Rounds are as
in `compare`; a ratio divides a system's speed by that of `headway` in the same round, and memory is the largest that
the process ever had, ours with the target in it. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infer.console.compare import Spread
from infer.options.cli import compose, entry_point
from infer.options.literal_text import literal_overrides
from infer.settings.paths import REPO_ROOT, resolve_path
from models.checkpoint import fingerprint
from models.checks import at_least, one_of
from models.targets import resolve_checkpoint
from scripts.benchmarks.comparison.rounds import order_of
from scripts.benchmarks.comparison.servers import check_built, target_folder
from scripts.benchmarks.config import OURS, THEIRS, TrainingConfig
from scripts.benchmarks.document import document, publish, table, without_folders
from train.config import TrainConfig

DRIVER = "tests/peers/speculators_train.py"
ALWAYS = (  # what the command line may change
    "features=offline", "tracker=none", "precision=bf16", "minutes=null", "steps=6", "eval_every=1000000",
    "eval_prompts=1", "eval_max_tokens=4", "data.num_sequences=32",
)  # fmt: skip


def read_metrics(text: str) -> dict[str, Any]:
    """Return what a run's metrics.jsonl says of its updates without the first; padding is not counted as tokens."""
    rows = [row for line in text.splitlines() if "train/tokens_per_s" in (row := json.loads(line))]
    tokens = [after["train/tokens"] - before["train/tokens"] for before, after in pairwise(rows)]
    seconds = sum(number / row["train/tokens_per_s"] for number, row in zip(tokens, rows[1:], strict=True))
    return {
        "tokens_per_s": sum(tokens) / seconds,
        "memory_gb": rows[-1]["train/memory_bytes"] / 1e9,  # at most, of the whole process
        "updates": len(tokens),
        "tokens_per_update": sum(tokens) / len(tokens),
        "losses": [rows[place]["train/loss"] for place in (1, -1)],
    }


def measure(config: TrainingConfig, training: TrainConfig, words: Sequence[str], place: Path) -> dict[str, Any]:
    """Run the systems in turn; return `summary` by name. `words` are those of train/run.py, all files lie in `place`.

    Raises ValueError if speculators is not there or has no such head, and with the messages of a run that fails.
    """
    from tqdm import tqdm

    python, target = resolve_path(config.peers) / THEIRS / "bin" / "python", None
    if any(name.startswith(THEIRS) for name in config.systems):
        one_of("head", training.head.name, ("eagle3", "dflash"))
        target = target_folder(training.model, str(check_built(python, THEIRS).parents[2]))
    numbers = count()

    def run(name: str, *more: str) -> dict[str, Any]:
        folder = place / f"run-{next(numbers)}"
        places = f"output_dir={place}", f"features.path={place}/features", f"head.path={folder}-head"
        command = [sys.executable, "train/run.py", *words, *more, *places, f"run={folder.name}"]
        if name.startswith(THEIRS):
            command = [str(word) for word in (python, DRIVER, place, folder, target, name, config.seconds)]
        done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"systems: {name}: ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return read_metrics((folder / "metrics.jsonl").read_text())

    run(OURS, "steps=2")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (OURS, *config.systems)}
    order = [name for number in range(config.rounds) for name in order_of(list(runs), number, THEIRS)]
    for name in tqdm(order, unit="run", disable=None):
        runs[name].append(run(name))
    return {name: summary(each, runs[OURS]) for name, each in runs.items()}


def summary(runs: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a document says of a system's rounds, medians with quartiles; `reference` are those of `headway`."""
    pairs = [(run["tokens_per_s"], other["tokens_per_s"]) for run, other in zip(runs, reference, strict=True)]
    speed, ratio = Spread.of([own for own, _ in pairs]), Spread.of([own / other for own, other in pairs])
    memory, of_ours = (max(run["memory_gb"] for run in each) for each in (runs, reference))
    return runs[-1] | {
        "tokens_per_s": speed.median,
        "from_to": [speed.low, speed.high],
        "ratio": ratio.median,
        "ratio_from_to": [ratio.low, ratio.high],
        "memory_gb": memory,
        "memory_ratio": memory / of_ours,
    }


def compare(config: TrainingConfig, words: Sequence[str]) -> None:
    training = compose("train", TrainConfig, literal_overrides(words, TrainConfig))
    at_least("steps", training.steps, 2)
    resolve_path(config.output_dir).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=resolve_path(config.output_dir)) as place:
        results = measure(config, training, words, Path(place))
    print(table([{"system": name, **cell} for name, cell in results.items()], pad=True), end="")
    target = fingerprint(resolve_checkpoint(training.model.path_or_hub_id, training.model.revision))
    report = document(training, target, results) | {"comparison": without_folders(asdict(config))}
    publish(report, config.save, training.model.name)


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of this command itself, and those of train/run.py."""
    names = {field.name for field in fields(TrainingConfig)}
    others = [word for word in words if "=" in word and word.partition("=")[0] not in names]
    return [word for word in words if word not in others], others


def main() -> None:
    sys.argv[1:], words = divided(sys.argv[1:])
    entry_point("bench_train", TrainingConfig)(partial(compare, words=[*ALWAYS, *words]))()
