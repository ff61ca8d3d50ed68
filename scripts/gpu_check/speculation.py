"""Measures speculation end to end on the inflated target and head: real acceptance at a large model's cost."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from infer.config import EngineConfig, ProposerConfig
from infer.config_checks import REPO_ROOT
from infer.engine import Engine
from infer.request import Request, SamplingParams
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets
from scripts.gpu_check.exactness import TEXTS, use_graphs
from scripts.gpu_check.measure import copy_bandwidth
from scripts.gpu_check.plan import Check, Group, LeftOut, Lines
from scripts.inflation import SHAPES, inflate_head, inflate_target

CHAIN = ProposerConfig(name="auto", max_draft_tokens=5)
SYSTEMS = {
    "plain": ("none", CHAIN),
    "head, chain 5": ("head", CHAIN),
    "head, tree 16": ("head", replace(CHAIN, tree="beam:4x5:16")),
    "synthetic, chain 5": ("synthetic", replace(CHAIN, acceptance=[0.88] * 5)),  # τ 4.46, and drafts that cost nothing
}
SHORT = ProposerConfig(name="auto", max_draft_tokens=2, acceptance=[0.9, 0.8])  # for the interpreter
SHORT_SYSTEMS = {
    "plain": ("none", SHORT),
    "head, chain 2": ("head", SHORT),
    "synthetic, chain 2": ("synthetic", SHORT),
}
INTERPRETED = (("none", "on"), ("none", "off"), ("head", "on"), ("synthetic", "off"))
PROFILED = 8  # rounds; a request emits at most six tokens in each
TAU = 4.5  # the acceptance length for which tokens/s with the head are also reported
TRAIN_SECONDS = 120  # that training takes beside `minutes`, at most
NEEDED_TO_TRAIN = ("hydra", "omegaconf", "accelerate")


class Run(NamedTuple):
    system: str
    proposer: str
    shape: ProposerConfig
    batch: int
    graphs: str  # see `use_graphs`


class Bench:
    """The inflated target's engine, made when it is first needed, and the token ids of plain decoding."""

    def __init__(self, device: torch.device, head: Path | None, minutes: float) -> None:
        """`head`: the folder of an EAGLE-3 head of the demo target."""
        self.device, self.on_gpu, self.head, self.minutes = device, device.type == "cuda", head, minutes
        self.head_is = "initialised from the target" if head is None else str(head)
        self.batches = (1, 8, 64) if self.on_gpu else (2,)
        self._engine: Engine | None = None
        self._limit = 0.0  # tokens/s at which a plain copy would read the weights
        self._plain: dict[int, list[list[int]]] = {}

    @cached_property
    def work(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()

    def checks(self) -> list[Check]:
        place = ("bench", "setup")
        checks = [Check("bench: target and head", place, 60, self.set_up)]
        if self.on_gpu and self.head is None:
            seconds = 60 * self.minutes + TRAIN_SECONDS
            checks.insert(0, Check(f"bench: train a head for {self.minutes} minutes", place, seconds, self.train))
        for run in self.runs():
            label = f"bench: {run.system}, batch {run.batch}, graphs {run.graphs}"
            checks.append(Check(label, ("bench", "runs"), 8, partial(self.measure, run)))
        return checks

    def runs(self) -> list[Run]:
        """Return all runs, those with graphs first, as an engine is served."""
        systems = SYSTEMS if self.on_gpu else SHORT_SYSTEMS
        runs = [
            Run(name, proposer, shape, batch, graphs)
            for batch in self.batches
            for graphs in ("on", "off")
            for name, (proposer, shape) in systems.items()
            if proposer != "synthetic" or graphs == "off"
        ]
        return runs if self.on_gpu else [run for run in runs if (run.proposer, run.graphs) in INTERPRETED]

    def train(self) -> Lines:
        missing = [name for name in NEEDED_TO_TRAIN if importlib.util.find_spec(name) is None]
        if missing:
            raise LeftOut(f"not installed: {', '.join(missing)}; drafts are those of an untrained head")
        self.head = train_head(Path(self.work.name), self.minutes)
        self.head_is = f"trained here for {self.minutes} minutes"
        return []

    def set_up(self) -> Lines:
        """Inflate target and head. Raises ValueError for a head that is not EAGLE-3."""
        source, shape, dtype = targets.DEMO, SHAPES["llama3.1-8b"], torch.bfloat16
        if not self.on_gpu:
            source, shape, dtype = Path(self.work.name) / "tiny", targets.WIDE, torch.float32
            targets.write_tiny(source)
        small = load_target(str(source))
        drafter = targets.taught_head(small) if self.head is None else load_head(self.head, target=small)
        if not isinstance(drafter, Eagle3Head):
            raise ValueError(
                f"--head {self.head}: a head of kind {drafter.name}; give an EAGLE-3 head of the demo target"
            )
        layers = small.config.num_layers
        wide = inflate_head(drafter, shape, target_layers=layers, dtype=dtype, device=self.device)
        target = inflate_target(source, shape, dtype=dtype, device=self.device)
        named = target.named_parameters()
        weights = sum(p.numel() * p.element_size() for name, p in named if "embed_tokens" not in name)
        self._limit = copy_bandwidth(self.device) * 1e9 / weights
        pool = 32768 if self.on_gpu else 128
        config = EngineConfig(max_batch=max(self.batches), max_tokens_in_cache=pool, graphs="off")
        self._engine = Engine(target, head=wide, config=config, probe=self.on_gpu)
        facts = {"target": f"{source.name} inflated", "weight_bytes": weights, "head": self.head_is}
        return [facts | {"plain_limit_tokens_per_s": round(self._limit, 1)}]

    def measure(self, run: Run) -> Lines:
        if self._engine is None:  # `set_up` failed, or was done by a process that ended
            self.set_up()
        engine, batch = self._engine, run.batch
        assert engine is not None
        line: dict[str, Any] = {"system": run.system, "batch": batch, "graphs": run.graphs}
        texts = self.prompts()
        prompts = [texts[index % len(texts)] for index in range(batch)]
        if batch not in self._plain:
            set_proposer(engine, "none", run.shape, "off")
            self._plain[batch], _ = measure(engine, prompts, self.max_tokens)
        set_proposer(engine, run.proposer, run.shape, run.graphs)
        if engine.graphs is not None:
            line |= {"recorded": engine.graphs.count, "recorded_bytes": engine.graphs.bytes}
        ids, numbers = measure(engine, prompts, self.max_tokens)
        if self.on_gpu or run.proposer == "none":  # on a CPU the result has no meaning, but the code must work
            numbers |= idle_time(engine, prompts, numbers["round_ms"])
        if run.proposer != "synthetic":
            numbers["ok"] = ids == self._plain[batch]
        if run.proposer == "none":
            numbers["of_limit"] = round(numbers["tokens_per_s"] / batch / self._limit, 4)
        if run.proposer == "head":
            numbers["head"] = self.head_is
            numbers["tokens_per_s_at_tau"] = {TAU: round(1000 * batch * TAU / numbers["round_ms"], 1)}
        return [line | numbers]

    @property
    def max_tokens(self) -> int:
        return 96 if self.on_gpu else 3

    def prompts(self) -> list[list[int]]:
        if not self.on_gpu:
            return [[5, 6, 7], [9, 8]]
        tokenizer = Tokenizer.load(targets.DEMO)
        return [tokenizer.encode(text) for text in TEXTS]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.work.cleanup()


def groups(device: torch.device, head: Path | None, minutes: float) -> list[Group]:
    bench = Bench(device, head, minutes)
    return [Group(bench.checks(), bench.close)]


def set_proposer(engine: Engine, proposer: str, shape: ProposerConfig, graphs: str) -> None:
    use_graphs(engine, graphs)
    engine.set_proposer(proposer, config=shape)


def prefilled(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
    """Add the prompts and run the engine until each has its first token; return their requests."""
    requests = [engine.request(engine.add(prompt, params)) for prompt in prompts]
    while any(request.output_length == 0 for request in requests):
        engine.step()
    return requests


def measure(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the token ids, and median time, tokens/s and τ of the rounds after the prefill of all prompts."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if engine.device.type == "cuda":
        engine.generate([prompts[0]], replace(params, max_tokens=8))  # compile kernels and warm caches
    requests, rounds, emitted = prefilled(engine, prompts, params), [], 0
    while engine.has_work:
        full = all(request.finish_reason is None for request in requests)
        begin = time.perf_counter()
        outputs = engine.step()  # token ids have reached the host
        if full:
            rounds.append(time.perf_counter() - begin)
            emitted += sum(len(output.token_ids) for output in outputs)
    steps, all_emitted = (sum(getattr(request.stats, key) for request in requests) for key in ("steps", "emitted"))
    return [request.output_ids for request in requests], {
        "round_ms": round(1000 * statistics.median(rounds), 3),
        "rounds_per_s": round(1 / statistics.median(rounds), 1),
        "tokens_per_s": round(emitted / sum(rounds), 1),
        "tau": round(all_emitted / steps, 3),
    }


def idle_time(engine: Engine, prompts: Sequence[list[int]], round_ms: float) -> dict[str, float]:
    """Return the GPU's busy time in a round by the profiler, and so its idle time in a round of `round_ms`.

    The last rounds, in which requests finish, are not profiled. On a CPU the result has no meaning.
    """
    requests = prefilled(engine, prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    on_gpu = engine.device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(engine.device)  # a round already in flight is not profiled
    with profile(activities=[kind]) as profiler:
        for _ in range(PROFILED if on_gpu else 1):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize(engine.device)
    for request in requests:
        engine.abort(request.request_id)
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1000 / (PROFILED if on_gpu else 1)
    return {"gpu_ms": round(busy, 3), "gap_us": round(1000 * (round_ms - busy), 1)}


def train_head(work: Path, minutes: float) -> Path:
    """Train a head for the demo target and return its folder. Raises ValueError with the end of the log if it fails."""
    command = [sys.executable, "train/run.py", "model=demo", "head=eagle3", "tracker=none", f"minutes={minutes}"]
    log = work / "train.log"
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, f"output_dir={work}"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=REPO_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            timeout=60 * minutes + TRAIN_SECONDS,
            check=False,
        )
    if done.returncode:
        raise ValueError(f"training a head failed: {log.read_text(errors='replace')[-2000:]}")
    return work / "heads" / "demo" / "eagle3"
