"""Measures how fast each head trains on this otherwise idle machine, and in how much memory.

    python scripts/train_time.py experiment=demo-heads heads=[eagle,eagle3,medusa,mlp,p-eagle] steps=12 save=training
    python scripts/train_time.py heads=[eagle3] steps=12 packing=true objective.fused=true \\
        against=[packing=false,objective.fused=false]
    python scripts/train_time.py heads=[eagle] steps=12 model.path=<folder> against=[objective.fused=false]

All arguments but `heads`, `against`, `rounds` and `save` are those of train/run.py, which runs once per head for a few
steps; the exported head is deleted. With `against` each head runs a second time with those overrides (for example with
the logits of all slots and one sequence per row). `rounds=3` alternates the two variants three times, for a machine
whose speed varies. MFU is the head's FLOP/s over those of a plain matrix product. The last line of standard output is
one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from models.heads import HEADS
from scripts.errors import reports_errors
from scripts.training import read_words, run_training, whole_number

OPTIONS = {"heads": f"[{','.join(HEADS)}]", "against": "[]", "rounds": "1", "save": ""}
WARM_UP = 2  # steps
SHOWN = ("data_s", "target_s", "head_s", "optimizer_s")


def run_words(head: str, words: list[str], name: str, exported: str) -> list[str]:
    return [*words, f"head={head}", f"run={name}", f"head.path={exported}", "tracker=none", "log_every=1"]


def items(text: str) -> list[str]:
    """[a, b] -> ["a", "b"]"""
    return [item.strip() for item in text.strip("[]").split(",") if item.strip()]


def compose(words: list[str]) -> Any:
    """Return the configuration of a run. Raises ValueError for words that training does not accept."""
    from infer.options.cli import compose
    from train.config import TrainConfig

    return compose("train", TrainConfig, words)


def check_words(heads: list[str], variants: dict[str, list[str]]) -> None:
    """Validate the arguments before any run begins. Raises ValueError for arguments that training does not accept."""
    for head in heads:
        for words in variants.values():
            steps = compose(run_words(head, words, "x", "x")).steps
            if steps is not None and steps <= WARM_UP:
                raise ValueError(f"steps={steps}: give more than {WARM_UP}, which warm up")


def run_head(head: str, words: list[str], name: str) -> list[dict[str, float]]:
    """Run one training and return the metrics of its steps after the warm-up.

    Raises SystemExit, with the run's exit code if it failed.
    """
    from infer.options.paths import resolve_path
    from train.publishing.trackers import read_metrics

    with tempfile.TemporaryDirectory() as exported:
        overrides = run_words(head, words, name, str(Path(exported) / "head"))
        config, process = compose(overrides), run_training(overrides)
    if process.returncode:
        raise SystemExit(process.returncode)
    rows = [row for row in read_metrics(resolve_path(config.output_dir) / name) if "train/tokens_per_s" in row]
    if len(rows) <= WARM_UP:
        raise SystemExit(
            f"error: minutes={config.minutes}: no more than the {WARM_UP} steps that warm up fitted into them"
        )
    return rows[WARM_UP:]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Summarise the steps: tokens per second (median and range), memory, head FLOP/s, and seconds by part of a step."""
    from train.step_clock import PARTS

    speeds = [row["train/tokens_per_s"] for row in rows]
    return {
        "tokens_per_s": statistics.median(speeds),
        "low": min(speeds),
        "high": max(speeds),
        "memory_gb": max(row["train/memory_bytes"] for row in rows) / 1e9,
        "head_flops_per_s": statistics.median(row["train/head_flops_per_s"] for row in rows),
        **{f"{part}_s": statistics.median(row[f"time/{part}"] for row in rows) for part in PARTS},
    }


def peak_flops(words: list[str]) -> float:
    """Return the FLOP/s of a matrix product in the dtype that the runs compute in."""
    from infer.options.devices import resolve_device
    from train.planning.plan import measure
    from train.planning.precision import compute_dtype

    config = compose(words)
    return measure(resolve_device(config.model.device), compute_dtype(config)).flops


def line(name: str, result: dict[str, float]) -> str:
    parts = ", ".join(f"{key[:-2]} {1e3 * result[key]:.0f} ms" for key in SHOWN)
    speed = f"{result['tokens_per_s']:.0f} tokens/s, {result['memory_gb']:.2f} GB, MFU {100 * result['mfu']:.1f} %"
    return f"{name:<28} {speed}; of a step: {parts}"


@reports_errors
def main() -> int:
    options = dict(OPTIONS)
    words = read_words(__doc__, options)
    from scripts.document import describe_machine, publish

    # Hydra rejects the same key twice, so an override from `against` replaces the earlier one.
    replacements = {word.partition("=")[0]: word for word in items(options["against"])}
    variants = {"": words}
    if replacements:
        kept = [word for word in words if word.partition("=")[0] not in replacements]
        variants["-against"] = [*kept, *replacements.values()]
    heads, rounds = items(options["heads"]), whole_number("rounds", options["rounds"])
    check_words(heads, variants)
    peak, begun = peak_flops(words), time.strftime("%Y%m%d-%H%M%S")  # a new name: an existing run would be resumed
    against, results = ",".join(replacements.values()), dict[str, Any]()
    for head in heads:
        rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
        for number in range(rounds):
            for variant, chosen in variants.items():
                rows[variant] += run_head(head, chosen, f"train-time-{head}{variant}-{begun}-{number}")
        for variant, steps in rows.items():
            result = summary(steps)
            result["mfu"] = result["head_flops_per_s"] / peak
            results[f"{head}{variant}"] = result
            print(line(head + (f" {against}" if variant else ""), result), flush=True)
    report = {"machine": describe_machine(), "words": words, "against": against, "peak_flops": peak, "heads": results}
    publish(report, options["save"], "demo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
