"""Measures speculation end to end on a random target of an 8B shape: what a round costs, and with the acceptance length
that the head has on the demo target, tokens per second. Run by `gpu_check.sh` alone: nothing here is a test.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.graphs import warm_up
from infer.request import Request, SamplingParams
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.device import DEVICE, ON_GPU, orders, sized
from tests.kernels.timing import copy_bandwidth
from tests.kernels.triton import targets

TEXTS = (
    "import os\n\ndef main():",
    "class Error(Exception):\n",
    "    def __init__(self, name, value):\n        self.name = name\n        self.",
    "for index in range(10):\n    print(index)\nfor index in range(10):\n    ",
)
DTYPE = sized(torch.float32, torch.bfloat16)
BATCHES, PROFILED_BATCHES = sized(((2,), (2,)), ((1, 8, 64), (1, 8)))
TOKENS, PROFILED = sized((3, 1), (96, 8))  # of a request; rounds, in each of which it emits at most six tokens
SHORT, CHAIN = (ProposerConfig(name="auto", adaptive=False, max_draft_tokens=length) for length in (2, 5))
SYSTEMS = sized(
    {
        "plain": ("none", SHORT),
        "head, chain 2": ("head", SHORT),
        "synthetic, chain 2": ("synthetic", replace(SHORT, acceptance=[0.9, 0.8])),
    },
    {
        "plain": ("none", CHAIN),
        "head, chain 3": ("head", replace(CHAIN, max_draft_tokens=3)),
        "head, chain 5": ("head", CHAIN),
        "head, tree 16": ("head", replace(CHAIN, tree="beam:4x5:16")),
        # τ 4.46, and drafts that cost nothing
        "synthetic, chain 5": ("synthetic", replace(CHAIN, acceptance=[0.88] * 5)),
    },
)
EAGER = ("plain", "head, chain 5", "synthetic, chain 5", "synthetic, chain 2")  # also without graphs
TAU = 4.5  # an acceptance length for which tokens/s with the head are also reported


class Run(NamedTuple):
    system: str
    batch: int
    graphs: str

    def __str__(self) -> str:
        return f"{self.system}, batch {self.batch}, graphs {self.graphs}"


# Those with graphs first, as an engine is served; the same graphs follow each other.
RUNS = [
    Run(name, batch, graphs)
    for graphs in ("on", "off")
    for name, (proposer, _) in SYSTEMS.items()
    for batch in BATCHES
    if (name in EAGER and batch <= 8 if graphs == "off" else proposer != "synthetic")
]


@dataclass
class Bench:
    """The engine, the weights that a step reads, and the head's acceptance length on the demo target by system."""

    engine: Engine
    weight_bytes: int
    tau: dict[str, float]
    plain: dict[int, list[list[int]]] = field(default_factory=dict)
    drafting: tuple[str, str] | None = None

    @property
    def limit(self) -> float:
        """Tokens per second at which a plain copy would read the weights."""
        return copy_bandwidth(DEVICE) * 1e9 / self.weight_bytes

    def draft(self, run: Run) -> None:
        if (run.system, run.graphs) != self.drafting:
            self.drafting = None
            self.engine.config.graphs = run.graphs
            proposer, shape = SYSTEMS[run.system]
            self.engine.set_proposer(proposer, config=shape)
            self.drafting = run.system, run.graphs

    def prompts(self, batch: int) -> list[list[int]]:
        tokenizer = Tokenizer.load(targets.DEMO)
        texts = [tokenizer.encode(text) for text in TEXTS] if ON_GPU else [[5, 6, 7], [9, 8]]
        return [texts[index % len(texts)] for index in range(batch)]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    target = targets.random_target(sized("tiny", "llama3.1-8b"), DTYPE, DEVICE)
    named = target.named_parameters()
    weights = sum(p.numel() * p.element_size() for name, p in named if "embed_tokens" not in name)
    config = EngineConfig(max_batch=max(BATCHES), max_tokens_in_cache=sized(128, 32768), graphs="off")
    head = targets.random_head(target, 32000) if ON_GPU else targets.taught_head(target)
    with patch.object(warm_up, "compiles", lambda device: False):  # kernels are compiled when they are needed
        made = Bench(
            Engine(target, head=head, config=config, proposer_config=CHAIN, probe=False), weights, {}
        )  # `exact` probes this shape
        yield made
    made.engine.close()


@pytest.mark.gpu(seconds=60)
def measure_acceptance(bench: Bench, record_property: Callable[..., None], pytestconfig: pytest.Config) -> None:
    """Measure the acceptance length of the head given, of the one trained here, or of an untrained one."""
    line: dict[str, Any] = {"target": "8B shape, random", "weight_bytes": bench.weight_bytes}
    if ON_GPU:
        told = orders(pytestconfig)
        trained = trained_head(Path(told["work"]))
        folder = Path(told["head"]) if told["head"] else trained if trained.exists() else None
        small = load_target(str(targets.DEMO))
        head = targets.taught_head(small) if folder is None else load_head(folder, target=small)
        line["head"] = "initialized from the target" if folder is None else str(folder)
        if not isinstance(head, Eagle3Head):
            raise ValueError(
                f"--head {folder}: a head of kind {head.name}; give an EAGLE-3 head, whose rounds are timed"
            )
        target = load_target(str(targets.DEMO), dtype=DTYPE, device=DEVICE)
        engine = Engine(
            target, head=head, config=EngineConfig(max_batch=8, graphs="off"), proposer_config=CHAIN, probe=False
        )
        for name, (proposer, shape) in SYSTEMS.items():
            if proposer == "head":
                engine.set_proposer(proposer, config=shape)
                bench.tau[name] = rounds_of(engine, bench.prompts(8))[1]["tau"]
        engine.close()
    line |= {"tau": bench.tau, "plain_limit_tokens_per_s": round(bench.limit, 1)}
    record_property("bench/setup", line)


@pytest.mark.gpu(seconds=8)
@pytest.mark.parametrize("run", RUNS, ids=str)
def measure_rounds(bench: Bench, record_property: Callable[..., None], run: Run) -> None:
    line: dict[str, Any] = run._asdict()
    if run.batch not in bench.plain:
        bench.draft(Run("plain", run.batch, "off"))
        bench.plain[run.batch], _ = rounds_of(bench.engine, bench.prompts(run.batch))
    bench.draft(run)
    if bench.engine.graphs is not None:
        line |= {"recorded": bench.engine.graphs.count, "recorded_bytes": bench.engine.graphs.bytes}
    ids, numbers = rounds_of(bench.engine, bench.prompts(run.batch))
    line |= numbers
    proposer, failures = SYSTEMS[run.system][0], bench.engine.stats.proposer_failures
    if proposer != "synthetic":
        line |= {"proposer_failures": failures, "ok": ids == bench.plain[run.batch] and not failures}
    if proposer == "none":
        line["of_limit"] = round(line["tokens_per_s"] / run.batch / bench.limit, 4)
    if proposer == "head":
        taus = [tau for tau in (TAU, bench.tau.get(run.system)) if tau is not None]
        line["tokens_per_s_at_tau"] = {tau: round(1000 * run.batch * tau / line["round_ms"], 1) for tau in taus}
    record_property("bench/runs", line)
    assert line.get("ok", True), "other token ids than plain decoding, or drafting failed"


@pytest.mark.gpu(seconds=6)
@pytest.mark.parametrize("run", [run for run in RUNS if run.batch in PROFILED_BATCHES], ids=str)
def measure_profile(bench: Bench, record_property: Callable[..., None], run: Run) -> None:
    """How long the GPU computes in a round and how long it waits; last, since the profiler slows down what follows."""
    bench.draft(run)
    record_property("bench/profiles", run._asdict() | gpu_time(bench.engine, bench.prompts(run.batch)))


def trained_head(work: Path) -> Path:
    """Return where the head lies that `train` has trained."""
    return work / "training" / "heads" / "demo" / "eagle3"


def prefilled(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
    """Add the prompts and run the engine until each has its first token; return their requests."""
    requests = [engine.request(engine.add(prompt, params)) for prompt in prompts]
    while any(request.output_length == 0 for request in requests):
        engine.step()
    return requests


def rounds_of(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the token ids, and median time, tokens/s and τ of the rounds after the prefill of all prompts."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    if ON_GPU:
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
    if ON_GPU:
        torch.cuda.synchronize(engine.device)  # a round already in flight is not profiled
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED):
            engine.step()
        if ON_GPU:
            torch.cuda.synchronize(engine.device)
        seconds = time.perf_counter() - begin
    for request in requests:
        engine.abort(request.request_id)
    events = [event for event in profiler.events() or () if not ON_GPU or event.device_type.name == "CUDA"]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy, extent = union_length(spans), max((e for _, e in spans), default=0) - min((s for s, _ in spans), default=0)
    by_kernel = Counter[str]()
    for event in events:
        by_kernel[event.name[:60]] += (event.time_range.end - event.time_range.start) / PROFILED
    return {
        "profiled_round_ms": round(1000 * seconds / PROFILED, 3),
        "gpu_ms": round(busy / 1000 / PROFILED, 3),
        "gap_us": round((extent - busy) / PROFILED, 1),
        "kernels": round(len(events) / PROFILED, 1),
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
