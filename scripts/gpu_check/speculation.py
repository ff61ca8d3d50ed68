"""Measures speculation end to end on the inflated target and head: real acceptance at a large model's cost."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import Request, SamplingParams
from models.heads.base import Head
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets
from scripts.gpu_check.exactness import TEXTS, use_graphs
from scripts.gpu_check.measure import copy_bandwidth
from scripts.gpu_check.plan import Check, Group, Lines
from scripts.gpu_check.training_run import trained_head
from scripts.inflation import SHAPES, inflate_head, inflate_target

CHAIN = ProposerConfig(name="auto", max_draft_tokens=5)
SYSTEMS = {
    "plain": ("none", CHAIN),
    "head, chain 3": ("head", replace(CHAIN, max_draft_tokens=3)),
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
EAGER = ("plain", "head, chain 5", "synthetic, chain 5")  # also without graphs
PROFILED = 8  # rounds; a request emits at most six tokens in each
TAU = 4.5  # the acceptance length for which tokens/s with the head are also reported
SET_UP = "bench: target and head"


class Run(NamedTuple):
    system: str
    proposer: str
    shape: ProposerConfig
    batch: int
    graphs: str  # see `use_graphs`

    def __str__(self) -> str:
        return f"{self.system}, batch {self.batch}, graphs {self.graphs}"


class Bench:
    """The inflated target's engine, made when it is first needed, and the token ids of plain decoding."""

    def __init__(self, device: torch.device, head: Path | None, trained: Path | None) -> None:
        """`head`: the folder of an EAGLE-3 head of the demo target; else the one that training left in `trained`."""
        self.device, self.on_gpu, self.trained = device, device.type == "cuda", trained
        self.head = head if self.on_gpu else None  # of the demo target, which the interpreter is too slow for
        self.batches = (1, 8, 64) if self.on_gpu else (2,)
        self._engine: Engine | None = None
        self._limit = 0.0  # tokens/s at which a plain copy would read the weights
        self._plain: dict[int, list[list[int]]] = {}
        self._drafting: tuple[str, ProposerConfig, str] | None = None

    @cached_property
    def work(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()

    def checks(self) -> list[Check]:
        """Return all checks; what attaches the profiler comes last, because it slows down what follows."""
        checks = [Check(SET_UP, ("bench", "setup"), 60, self.set_up)]
        for run in self.runs():
            checks.append(Check(f"bench: {run}", ("bench", "runs"), 8, partial(self.measure, run), needs=SET_UP))
        for run in self.runs():
            if run.batch in (1, 8) or not self.on_gpu:
                call = partial(self.profiled, run)
                checks.append(Check(f"bench: profile of {run}", ("bench", "profiles"), 6, call, needs=SET_UP))
        return checks

    def runs(self) -> list[Run]:
        """Return all runs, those with graphs first, as an engine is served; the same graphs follow each other."""
        systems = SYSTEMS if self.on_gpu else SHORT_SYSTEMS
        runs = [
            Run(name, proposer, shape, batch, graphs)
            for graphs in ("on", "off")
            for name, (proposer, shape) in systems.items()
            for batch in self.batches
            if (batch <= 8 or graphs == "on")
            and ((graphs == "off") == (proposer == "synthetic") or (graphs == "off" and name in EAGER))
        ]
        return runs if self.on_gpu else [run for run in runs if (run.proposer, run.graphs) in INTERPRETED]

    def drafter(self, small: LlamaTarget) -> tuple[Head, str]:
        """Return the head to enlarge and what it is: the one given, the one trained here, or an untrained one."""
        if self.head is not None:
            return load_head(self.head, target=small), str(self.head)
        if self.trained is not None and self.trained.exists():
            return load_head(self.trained, target=small), "trained here"
        return targets.taught_head(small), "initialised from the target"

    def set_up(self) -> Lines:
        """Inflate target and head. Raises ValueError for a head that is not EAGLE-3."""
        source, shape, dtype = targets.DEMO, SHAPES["llama3.1-8b"], torch.bfloat16
        if not self.on_gpu:
            source, shape, dtype = Path(self.work.name) / "tiny", targets.WIDE, torch.float32
            targets.write_tiny(source)
        small = load_target(str(source))
        drafter, self.head_is = self.drafter(small)
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
        self._engine = Engine(target, head=wide, config=config, probe=False)  # `exact` probes this shape
        facts = {"target": f"{source.name} inflated", "weight_bytes": weights, "head": self.head_is}
        return [facts | {"plain_limit_tokens_per_s": round(self._limit, 1)}]

    def engine_for(self, run: Run) -> tuple[Engine, list[list[int]]]:
        """Return the engine, set to draft as the run says, and the prompts."""
        if self._engine is None:  # `set_up` was done by a process that ended
            self.set_up()
        assert self._engine is not None
        drafting = run.proposer, run.shape, run.graphs
        if drafting != self._drafting:
            self._drafting = None
            set_proposer(self._engine, *drafting)
            self._drafting = drafting
        texts = self.prompts()
        return self._engine, [texts[index % len(texts)] for index in range(run.batch)]

    def measure(self, run: Run) -> Lines:
        line: dict[str, Any] = {"system": run.system, "batch": run.batch, "graphs": run.graphs}
        if run.batch not in self._plain:
            engine, prompts = self.engine_for(run._replace(proposer="none", shape=CHAIN, graphs="off"))
            self._plain[run.batch], _ = measure(engine, prompts, self.max_tokens)
        engine, prompts = self.engine_for(run)
        if engine.graphs is not None:
            line |= {"recorded": engine.graphs.count, "recorded_bytes": engine.graphs.bytes}
        ids, numbers = measure(engine, prompts, self.max_tokens)
        if run.proposer != "synthetic":
            numbers["proposer_failures"] = engine.stats.proposer_failures
            numbers["ok"] = ids == self._plain[run.batch] and not numbers["proposer_failures"]
        if run.proposer == "none":
            numbers["of_limit"] = round(numbers["tokens_per_s"] / run.batch / self._limit, 4)
        if run.proposer == "head":
            numbers["head"] = self.head_is
            numbers["tokens_per_s_at_tau"] = {TAU: round(1000 * run.batch * TAU / numbers["round_ms"], 1)}
        return [line | numbers]

    def profiled(self, run: Run) -> Lines:
        """Return how long the GPU computes in a round and how long it waits, with the profiler attached."""
        engine, prompts = self.engine_for(run)
        line = {"system": run.system, "batch": run.batch, "graphs": run.graphs}
        return [line | gpu_time(engine, prompts)]

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


def groups(device: torch.device, options: Namespace) -> list[Group]:
    trained = trained_head(options.work / "training") if options.work else None
    bench = Bench(device, options.head, trained)
    return [Group("bench", "bench", bench.checks(), bench.close)]


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


def gpu_time(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Return, for a round, its time on the host, the GPU's busy and idle time, and the kernels that took longest.

    Kernels that overlap count once: busy time is the length of the union of their intervals. The last rounds, in which
    requests finish, are not profiled. On a CPU the result has no meaning.
    """
    requests = prefilled(engine, prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    on_gpu, rounds = engine.device.type == "cuda", PROFILED if engine.device.type == "cuda" else 1
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(engine.device)  # a round already in flight is not profiled
    with profile(activities=[kind]) as profiler:
        begin = time.perf_counter()
        for _ in range(rounds):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize(engine.device)
        seconds = time.perf_counter() - begin
    for request in requests:
        engine.abort(request.request_id)
    events = [event for event in profiler.events() or () if not on_gpu or event.device_type.name == "CUDA"]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy, extent = union_length(spans), max((e for _, e in spans), default=0) - min((s for s, _ in spans), default=0)
    by_kernel = Counter[str]()
    for event in events:
        by_kernel[event.name[:60]] += (event.time_range.end - event.time_range.start) / rounds
    return {
        "profiled_round_ms": round(1000 * seconds / rounds, 3),
        "gpu_ms": round(busy / 1000 / rounds, 3),
        "gap_us": round((extent - busy) / rounds, 1),
        "kernels": round(len(events) / rounds, 1),
        "longest_us": {name: round(us, 1) for name, us in by_kernel.most_common(16)},
    }


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> union_length([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
