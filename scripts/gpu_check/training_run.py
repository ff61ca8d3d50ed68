"""Trains a head for the demo target with the command that users type, beside the checks that are not timed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from infer.options.paths import REPO_ROOT
from scripts.gpu_check.plan import Check, Group, LeftOut, Lines

SECONDS = 60  # that it takes beside `minutes`
STALLED = 120  # seconds beyond that after which it hangs
NEEDED = ("hydra", "omegaconf", "accelerate")
RATE = re.compile(r"step/s, loss ([\d.]+), (\d+) tokens/s")


@dataclass(frozen=True)
class Training:
    minutes: float
    folder: Path

    def run(self) -> Lines:
        """Train; the speed is that of its last steps, beside other processes on the same GPU."""
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise LeftOut(f"not installed: {', '.join(missing)}")
        words = ["model=demo", "head=eagle3", "tracker=none", f"minutes={self.minutes}", f"output_dir={self.folder}"]
        log = self.folder / "train.log"
        self.folder.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            done = subprocess.run(
                [sys.executable, "train/run.py", *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=REPO_ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                timeout=60 * self.minutes + SECONDS + STALLED,
                check=False,
            )
        said = log.read_text(errors="replace")
        if done.returncode:
            raise ValueError(f"training a head failed: {said[-2000:]}")
        rates = [{"loss": float(loss), "tokens_per_s": int(rate)} for loss, rate in RATE.findall(said)]
        return [{"minutes": self.minutes, "steps_seen": len(rates), **(rates[-1] if rates else {})}]


def trained_head(folder: Path) -> Path:
    """Return where the head lies that was trained in `folder`."""
    return folder / "heads" / "demo" / "eagle3"


def groups(device: torch.device, options: Namespace) -> list[Group]:
    """Return one check; none in the interpreter, nor with a head that was trained before, or no time to train one."""
    if device.type != "cuda" or options.minutes <= 0:
        return []
    folder = (options.work or Path("/nowhere")) / "training"
    check = Check(
        "train: a head for the demo target",
        ("training",),
        60 * options.minutes + SECONDS,
        Training(options.minutes, folder).run,
    )
    return [Group("train", "train", [check])]
