"""Trains a head with speculators' own trainer on a CPU, for scripts/bench.py train.

    .peers/speculators/bin/python tests/peers/speculators_train.py PLACE FOLDER TARGET SYSTEM SECONDS

Runs in speculators' environment (`scripts/peers.sh speculators`) and imports nothing of this repository. PLACE/run-0 is
a run of train/run.py, PLACE/run-0-head the head that it exported, PLACE/features the store of its features, TARGET a
folder with the target's weights. SYSTEM is speculators:<rows>x<tokens>:<attention>: the library packs documents into
one row, here of up to rows * tokens, and the run's rows are cut into documents of up to `tokens`. All of the run's
tokens are trained on, with its loss mask, features, steps, draft vocabulary and optimizer; the head begins with the
exported weights, in fp32, and computes in bf16, as the library does by default. FOLDER/metrics.jsonl gets a row for
every update, with train/run.py's names; the run ends after SECONDS of updates, not counting the first.

The trainer expects an accelerator: `use_cpu` replaces what it asks of one. Its fused losses are Triton kernels, so
those of torch are used.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

LAST = -1  # the store's id of the LM head's input
LEAST = 2  # updates that are measured


def rows_of(place: Path, length: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids, loss mask and hidden states `[tokens, layers, H]`, the LM head's input last, of every trained row."""
    layers = json.loads((place / "features" / "manifest.json").read_text())["layers"]
    order = [layers.index(layer) for layer in layers if layer != LAST] + [layers.index(LAST)]
    shards = (safe_open(file, framework="pt") for file in sorted((place / "features").glob("shard-*")))
    data, left = load_file(place / "run-0" / "data" / "train.safetensors"), torch.empty(0)
    for first, last in pairwise(data["offsets"].tolist()):
        ids, mask = (data[name][first : min(last, first + length)] for name in ("ids", "assistant"))
        if not (mask[1:-1] & mask[2:]).any():
            continue  # train/run.py leaves it out, too
        while len(left) < len(ids):
            states = next(shards).get_tensor("features")[:, order]
            left = torch.cat([left, states]) if len(left) else states
        states, left = left[: len(ids)], left[len(ids) :]
        yield ids.long(), mask.long(), states


def write_data(place: Path, folder: Path, length: int, tokens: int) -> int:
    """Write the rows, cut into documents of up to `tokens`, in the library's layout; return how many these are."""
    documents: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    (folder / "hidden_states").mkdir(parents=True)

    def add(ids: Tensor, mask: Tensor, states: Tensor) -> None:
        number = len(documents["seq_len"])
        for key, value in zip(documents, (ids.tolist(), mask.tolist(), len(ids)), strict=True):
            documents[key].append(value)
        parts = {"hidden_states": states.contiguous(), "token_ids": ids.contiguous()}
        save_file(parts, folder / "hidden_states" / f"hs_{number}.safetensors")

    for row in rows_of(place, length):
        for parts in zip(*(part.split(tokens) for part in row), strict=True):
            if (parts[1][1:-1] & parts[1][2:]).any():
                add(*parts)
    add(*parts)  # it wants a validation split, which is not used
    Dataset.from_dict(documents).with_format("torch").save_to_disk(folder)
    return len(documents["seq_len"]) - 1


def write_head(place: Path, folder: Path, target: str) -> Path:
    """Write a copy of the exported head that names the folder of its target."""
    shutil.copytree(place / "run-0-head", folder)
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = target
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def memory_bytes() -> int:
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


class Timed:
    """A loader that yields batches until the time is over, and records what every update took."""

    def __init__(self, loader: Any, seconds: float, file: Path) -> None:
        self.loader, self.seconds, self.file = loader, seconds, file
        self.losses: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        begin, measured, updates, total = time.perf_counter(), 0.0, 0, 0
        while True:
            for numbers, batch in zip(list(self.loader.batch_sampler), self.loader, strict=True):
                tokens = sum(self.loader.dataset.approx_lengths[number] for number in numbers)
                yield batch
                now, total, updates = time.perf_counter(), total + tokens, updates + 1
                measured += now - begin if updates > 1 else 0.0
                row = {"train/tokens": total, "train/tokens_per_s": tokens / (now - begin)}
                row |= {"train/loss": self.losses[-1], "train/memory_bytes": memory_bytes()}
                with self.file.open("a") as file:
                    print(json.dumps({"step": updates, **row}), file=file)
                if updates > LEAST and measured >= self.seconds:
                    return
                begin = time.perf_counter()


def use_cpu(cli: Any, trainer: Any) -> None:
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *arguments, **options: torch.device("cpu")
    accelerator.is_available = lambda: False
    accelerator.synchronize = lambda *arguments: None
    trainer.get_local_rank = lambda: "cpu"
    build = cli.build_draft_model

    def build_in_fp32(*arguments: Any) -> Any:
        model = build(*arguments).float()  # the exported head is in the target's dtype
        model.verifier_norm = torch.nn.Identity()  # the store has the state after it
        return model

    cli.build_draft_model = build_in_fp32


def main(place: Path, folder: Path, target: str, system: str, seconds: float) -> None:
    config = yaml.safe_load((place / "run-0" / "config.yaml").read_text())
    _, shape, attention = f"{system}:sdpa".split(":")[:3]
    rows, tokens = map(int, shape.split("x"))
    count = write_data(place, folder / "data", config["sequence_length"], tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here

    from speculators.train import cli, trainer  # pyright: ignore[reportMissingImports]
    from speculators.train.config import TrainConfig  # pyright: ignore[reportMissingImports]

    use_cpu(cli, trainer)
    if config["engine"]["threads"]:
        torch.set_num_threads(config["engine"]["threads"])

    def run_training(self: Any) -> None:
        loader = self.train_loader = Timed(self.train_loader, seconds, folder / "metrics.jsonl")
        self.model.register_forward_hook(lambda module, inputs, output: loader.losses.append(output[1].item()))
        self.train_epoch(0)
        accelerator: Any = torch.accelerator
        accelerator.current_accelerator = lambda **options: None  # whose cache would be emptied

    trainer.Trainer.run_training = run_training
    objective = config["objective"]
    options = {
        "verifier-name-or-path": target, "speculator-type": config["head"]["name"], "data-path": folder / "data",
        "from-pretrained": write_head(place, folder / "head", target), "save-path": folder / "checkpoints",
        "total-seq-len": rows * tokens, "train-data-ratio": (count + 0.5) / (count + 1), "on-missing": "raise",
        "draft-attn-impl": attention, "loss-implementation": "eager", "num-workers": 0, "epochs": 1,
        "optimizer": config["optim"]["name"], "scheduler-type": "none",
    }  # fmt: skip
    if "num_anchors" in objective:  # as many of as many tokens
        options["max-anchors"] = max(1, objective["num_anchors"] * rows * tokens // config["sequence_length"])
    else:
        options["ttt-steps"] = objective["steps"]
    cli.main(TrainConfig.resolve([f"--{key}={value}" for key, value in options.items()]))


if __name__ == "__main__":
    chosen_place, chosen_folder, *names, limit = sys.argv[1:]
    main(Path(chosen_place), Path(chosen_folder), names[0], names[1], float(limit))
