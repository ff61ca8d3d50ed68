"""Faults of a training run, after each of which the same command must end with the same weights, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infer.options.cli import USER_ERROR
from models.heads import DEFAULT_HEAD
from scripts.faults.lab import CANARY, Broken, Lab, Process, damage, limit_memory, suspend, wait_until

ATTEMPTS = 6  # of resuming what is damaged: each error names a file, which is then deleted
SETTINGS = [
    f"head={DEFAULT_HEAD}", "run=run", "features=offline", "tracker=none", "precision=fp32", "minutes=null", "steps=16",
    "batch_size=4", "checkpoint_every=3", "eval_every=8", "eval_prompts=2", "eval_max_tokens=16", "eval_draft_tokens=2",
    "data=files", "data.num_sequences=16", "data.max_new_tokens=24", "data.prompt_tokens=12", "sequence_length=80",
    "head.draft_vocab_size=256", "objective.steps=2", "engine.threads=1", "engine.max_tokens_in_cache=2048",
]  # fmt: skip
RANKS = {"training": 1, "training, two ranks": 2}


class Situation(NamedTuple):
    lab: Lab
    trainings: Trainings
    ranks: int
    process: Process
    output: Path

    @property
    def pids(self) -> list[int]:
        """The trainer's processes, without torchrun."""
        return [pid for pid in self.lab.started() if self.ranks == 1 or pid != self.process.child.pid]


def kill(s: Situation) -> None:
    for pid in s.lab.started():
        os.kill(pid, signal.SIGKILL)


def kill_a_rank(s: Situation) -> None:
    wait_until(lambda: len(s.pids) == s.ranks or s.process.child.poll() is not None, "ranks do not start")
    if s.pids:
        os.kill(s.lab.random.choice(s.pids), signal.SIGKILL)


def full_disk(s: Situation) -> None:
    with s.lab.full_disk():
        s.process.wait()


def slow_disk(s: Situation) -> None:
    with s.lab.slow_disk():
        time.sleep(s.lab.random.uniform(1, 3))


def no_memory(s: Situation) -> None:
    limit_memory(s.process.child.pid, 2 ** s.lab.random.randrange(12, 24))


def second_process(s: Situation) -> None:
    wait_until(lambda: (s.output / "run" / "config.yaml").exists(), "the run does not begin")
    running = s.process.child.poll() is None
    second = s.trainings.start(s.output, s.ranks)
    code = second.wait()
    if running and s.process.child.poll() is None and code != USER_ERROR:
        raise Broken(f"a second process in one folder ends with {code}: {second.said[-1500:]}")


def damaged(pattern: str) -> Callable[[Situation], None]:
    """Kill the run once there is a checkpoint, and damage a file of those that `pattern` finds."""

    def act(s: Situation) -> None:
        latest = s.output / "run" / "checkpoints" / "latest"
        wait_until(lambda: latest.exists() or s.process.child.poll() is not None, "no checkpoint is written")
        kill(s)
        s.process.wait()
        damage([*s.output.glob(pattern.format(latest=latest.read_text().strip()))], s.lab.random)

    return act


class Fault(NamedTuple):
    act: Callable[[Situation], object]
    codes: tuple[int | None, ...] = (0,)  # of the disturbed process; None: any
    words: tuple[str, ...] = ()  # of its command line


KILLED = Fault(kill, codes=(-signal.SIGKILL, 0))
DAMAGED = {
    "damaged checkpoint": Fault(damaged("run/checkpoints/{latest}/*"), codes=(None,)),
    # those recorded while responses are generated are made anew by another forward, whose rounding differs
    "damaged features": Fault(damaged("features/*/*/[!.]*"), (None,), ("features.record=false",)),
}
FAULTS: dict[str, dict[str, Fault]] = {
    "training": {
        "kill -9": KILLED,
        "SIGSTOP": Fault(lambda s: suspend(s.pids, s.lab.random.uniform(1, 3))),
        "full disk": Fault(full_disk, codes=(USER_ERROR, 1, 0)),  # 1: its log has no room for the error either
        "slow disk": Fault(slow_disk),
        "memory limit": Fault(no_memory, codes=(None,)),
        "two processes in one folder": Fault(second_process),
        **DAMAGED,
    },
    "training, two ranks": {"kill -9": KILLED, "kill -9 of a rank": Fault(kill_a_rank, codes=(None,))},
}


class Trainings:
    def __init__(self, lab: Lab, words: list[str]) -> None:
        self._lab, self._words, self._expected = lab, words, dict[tuple[Any, ...], tuple[str, float]]()
        self._rows = lab.folder / "prompts.jsonl"
        rows = (json.dumps({"prompt": f"def {CANARY}_{number}("}) for number in range(20))
        self._rows.write_text("\n".join(rows) + "\n")
        self.counts = Counter[str]()

    def names(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, faults in FAULTS.items() for name in faults]

    def start(self, output: Path, ranks: int, more: Sequence[str] = ()) -> Process:
        parallel = ["parallel=ddp", "batch_size=2"] if ranks > 1 else []
        words = [*self._words, *SETTINGS, *parallel, *more, f"data.path={self._rows}", f"output_dir={output}"]
        return self._lab.start("train/run.py", *words, ranks=ranks)

    def run(self, kind: str, name: str) -> None:
        """Disturb a run at a random moment and resume it. Raises Broken unless it ends as an undisturbed one."""
        fault, ranks = FAULTS[kind][name], RANKS[kind]
        output = self._lab.disk / "disturbed"
        if (of := (ranks, *fault.words)) not in self._expected:
            begin, whole = time.monotonic(), self._lab.disk / "undisturbed"
            if code := (process := self.start(whole, ranks, fault.words)).wait():
                raise Broken(f"an undisturbed run ends with {code}: {process.said[-1500:]}")
            self._expected[of] = self._digest(whole), time.monotonic() - begin
            shutil.rmtree(whole)
        expected, seconds = self._expected[of]
        process = self.start(output, ranks, fault.words)
        time.sleep(self._lab.random.uniform(0.1, 0.8) * seconds)
        fault.act(Situation(self._lab, self, ranks, process, output))
        code = process.wait()
        self.counts["resumed" if code else "not interrupted"] += 1
        if code not in fault.codes and None not in fault.codes:
            raise Broken(f"the disturbed run ends with {code}: {process.said[-1500:]}")
        wait_until(lambda: not self._lab.started(), "processes outlive the run")
        self._resume(output, ranks, fault.words)
        if (found := self._digest(output)) != expected:
            raise Broken(f"other weights, {found} and not {expected}")
        self._lab.check_nothing_left(output)
        shutil.rmtree(output)

    def _resume(self, output: Path, ranks: int, more: Sequence[str]) -> None:
        """Repeat the command until it ends well; what an error names is deleted before, as it says."""
        for _ in range(ATTEMPTS):
            process = self.start(output, ranks, more)
            if (code := process.wait()) == 0:
                return
            words = re.findall(r"/[^\s:;,()]+", process.said.split("error: ")[-1])
            named = next((Path(word) for word in words if output in Path(word).parents and Path(word).exists()), None)
            if code != USER_ERROR or named is None:
                raise Broken(f"resuming ends with {code}: {process.said[-1500:]}")
            self.counts["refused by name"] += 1
            shutil.rmtree(named) if named.is_dir() else named.unlink()
        raise Broken(f"resuming fails {ATTEMPTS} times")

    def _digest(self, output: Path) -> str:
        (file,) = output.glob("heads/*/*/model.safetensors")
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    def forget(self) -> None:
        for name in ("disturbed", "undisturbed"):
            shutil.rmtree(self._lab.disk / name, ignore_errors=True)

    def stop(self) -> None:
        self._lab.check_nothing_left()
