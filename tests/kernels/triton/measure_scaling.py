"""Measures, by the number of requests, what adaptive drafts reach beside plain decoding and a fixed chain, and what
exactness costs: an engine of an 8B shape beside one with the library's matrix products. Run by `gpu_check.sh` alone.

Ratios are of runs that follow each other, and have the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from infer.batch.tree import DraftTree
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.graphs import warm_up
from infer.graphs.step_graph import GraphCache
from infer.graphs.step_state import GraphBatch
from infer.request import SamplingParams
from kernels.noise import mix32
from models.layers import Linear
from tests.device import DEVICE, ON_GPU, sized
from tests.kernels.triton import targets
from tests.kernels.triton.measure_engines import DTYPE, rounds_of

LENGTH = sized(2, 5)  # of the fixed chain, and the most that adaptive drafts have
SYSTEMS = {
    "plain": ("none", ProposerConfig(name="auto", adaptive=False, max_draft_tokens=LENGTH)),
    "chain": ("head", ProposerConfig(name="auto", adaptive=False, max_draft_tokens=LENGTH)),
    "auto": ("auto", ProposerConfig(name="auto", max_draft_tokens=LENGTH)),
}
# Requests, the fewest and the most first, and the seconds that they take at most
BATCHES = sized({1: 9.0}, {1: 15.0, 256: 45.0, 64: 20.0, 16: 12.0, 4: 12.0, 128: 30.0})
PRICED = sized({1: 9.0}, {1: 12.0, 64: 18.0, 256: 40.0, 8: 12.0})
PROMPTS = sized((1,), (1, 8))  # read together
PROMPT, READ = sized((4, 9), (64, 1024))  # tokens of prompts: of requests that decode, and of those that are only read
TIMES = sized(1, 3)  # pairs of runs
RATES = {2.2: 0.56, 3.0: 0.709}  # of acceptance at every depth, by the acceptance length of a chain of five
ALWAYS = 2**32
CHOOSE = GraphBatch.choose


class Coins:
    """Lets the target choose what was drafted at a rate, whatever its logits, in steps that are captured: drafts of a
    random head are never right. Rates of synthetic acceptance, by contrast, are of drafts that cost nothing, and the
    host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._below = torch.zeros((), dtype=torch.int64, device=device)  # which graphs read

    def set(self, rate: float) -> None:
        self._below.fill_(round(rate * ALWAYS))

    def choose(self, rows: GraphBatch, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the choice at every node `[B, N]` of a batch of chains, whose node i + 1 is drafted after i."""
        choice = CHOOSE(rows, tree, logits, positions)
        if tree.is_chain and tree.token.shape[1] > 1:
            coins = mix32(positions.view_as(choice)[:, :-1] * 4096 + rows.slots[:, None])
            choice[:, :-1] = torch.where(coins < self._below, tree.token[:, 1:].to(choice.dtype), choice[:, :-1])
        return choice


@dataclass
class Served:
    """An engine, and the graphs of each system, which are captured once."""

    engine: Engine
    graphs: dict[str, GraphCache] = field(default_factory=dict)

    def draft(self, system: str) -> None:
        (proposer, shape), engine = SYSTEMS[system], self.engine
        engine._graph_cache = self.graphs.setdefault(system, GraphCache(engine.config, engine.context))
        engine.proposer_config = shape  # so that the engine goes on with these
        engine.set_proposer(proposer, config=shape)

    def tokens_per_s(self, system: str, requests: int) -> dict[str, Any]:
        self.draft(system)
        return rounds_of(self.engine, prompts(requests, PROMPT))[1]

    def read_s(self, requests: int, turn: int) -> float:
        """Return the seconds until the last of so many prompts has its first token. No page is cached."""
        texts = prompts(requests, READ, seed=1 + turn)
        begin = time.perf_counter()
        self.engine.generate(texts, SamplingParams(max_tokens=1, ignore_eos=True))
        return time.perf_counter() - begin

    @property
    def products(self) -> str:
        return next(m.packed.kernel for m in self.engine.target.modules() if isinstance(m, Linear) and m.packed)


@dataclass
class Pair:
    """The exact engine, and the one with the library's products, each made when it is needed."""

    coins: Coins
    made: dict[bool, Served] = field(default_factory=dict)

    def serves(self, *, exact: bool) -> Served:
        if exact not in self.made:
            target = targets.random_target(sized("tiny", "llama3.1-8b"), DTYPE, DEVICE)
            head = targets.random_head(target, sized(100, 32000))
            most = max((*BATCHES, *PRICED))
            config = EngineConfig(
                exact=exact,
                graphs="on",
                max_batch=most,
                max_tokens_in_cache=sized(160, 192 * most),  # of prompt, answer and the drafts beyond
                max_rows=sized(16, 2048),
                prefill_chunk=sized(16, 1024),
            )
            _, shape = SYSTEMS["plain"]
            options: dict[str, Any] = {"proposer": "none", "proposer_config": shape, "config": config, "probe": False}
            self.made[exact] = Served(Engine(target, head=head, **options))
        return self.made[exact]


def prompts(requests: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, of which no two begin alike."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = targets.SHAPES[sized("tiny", "llama3.1-8b")]["vocab_size"]
    return torch.randint(1, vocabulary, (requests, length), generator=generator).tolist()


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return what pairs of runs say.

    >>> spread([1.0, 0.9, 1.3])
    {'median': 1.0, 'least': 0.9, 'most': 1.3}
    """
    values = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 4) for name, value in values.items()}


@contextmanager
def made_pair() -> Iterator[Pair]:
    pair = Pair(Coins(DEVICE))

    def choose(rows: GraphBatch, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        return pair.coins.choose(rows, tree, logits, positions)

    with (
        patch.object(warm_up, "compiles", lambda device: False),  # kernels are compiled when they are needed
        patch.object(GraphBatch, "choose", choose),
    ):
        yield pair
    for served in pair.made.values():
        served.engine.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with made_pair() as pair:
        yield pair


@pytest.mark.gpu(seconds=50)
def measure_engine(pair: Pair, record_property: Callable[..., None]) -> None:
    """Make the exact engine, capture its graphs, and measure what its steps and drafts cost."""
    served = pair.serves(exact=True)
    recorded = {}
    for system in SYSTEMS:
        served.draft(system)
        assert served.engine.graphs is not None
        recorded[system] = served.engine.graphs.count, served.engine.graphs.bytes
    costs = served.engine.costs
    line = {"recorded": recorded, "sizes": str(served.engine.sizes), "memory": str(served.engine.memory)}
    record_property("scaling/engine", line | {"costs": costs and asdict(costs)})


@pytest.mark.parametrize(
    "requests", [pytest.param(n, marks=pytest.mark.gpu(seconds=seconds)) for n, seconds in BATCHES.items()]
)
def measure_adaptive_drafts(pair: Pair, record_property: Callable[..., None], requests: int) -> None:
    """Beside the better one of plain decoding and the chain, at each acceptance length: never slower is the aim."""
    served, failures = pair.serves(exact=True), 0
    runs: dict[float, list[dict[str, dict[str, Any]]]] = {tau: [] for tau in RATES}
    for _ in range(1 + TIMES if ON_GPU else TIMES):
        plain = served.tokens_per_s("plain", requests)
        for tau, rate in RATES.items():
            pair.coins.set(rate)
            drafted = {system: served.tokens_per_s(system, requests) for system in ("chain", "auto")}
            runs[tau].append({"plain": plain, **drafted})
            failures += served.engine.stats.proposer_failures
    for tau, all_runs in runs.items():
        seen = all_runs[-TIMES:]  # in the first one kernels are compiled, and the acceptance is learnt
        speeds = [{system: numbers["tokens_per_s"] for system, numbers in run.items()} for run in seen]
        line: dict[str, Any] = {"requests": requests, "chain_tau": tau, "runs": seen}
        line["auto_of_best"] = spread([speed["auto"] / max(speed["plain"], speed["chain"]) for speed in speeds])
        line["auto_of_plain"] = spread([speed["auto"] / speed["plain"] for speed in speeds])
        record_property("scaling/auto", line)
    assert not failures, f"drafting failed in {failures} requests, which went on without"


@pytest.mark.gpu(seconds=30)
def measure_library_engine(pair: Pair, record_property: Callable[..., None]) -> None:
    record_property("scaling/products", {exact: pair.serves(exact=exact).products for exact in (True, False)})


@pytest.mark.parametrize(
    "requests", [pytest.param(n, marks=pytest.mark.gpu(seconds=seconds)) for n, seconds in PRICED.items()]
)
def measure_price_of_exactness(pair: Pair, record_property: Callable[..., None], requests: int) -> None:
    """Of decoding: rounds of the engine with the library's products per one of the exact one's."""
    pair.coins.set(RATES[2.2])
    for system in ("plain", "chain"):
        run = partial(Served.tokens_per_s, system=system, requests=requests)
        record_property("scaling/price", {"requests": requests, "system": system} | priced(pair, run, "round_ms"))


@pytest.mark.gpu(seconds=8)
@pytest.mark.parametrize("requests", PROMPTS)
def measure_price_of_exact_prompts(pair: Pair, record_property: Callable[..., None], requests: int) -> None:
    for served in (pair.serves(exact=exact) for exact in (True, False)):
        served.draft("plain")
    turns = iter(range(100))
    record_property(
        "scaling/price",
        {"prompts": requests, "tokens": READ}
        | priced(pair, lambda served: {"read_s": served.read_s(requests, next(turns))}, "read_s"),
    )


def priced(pair: Pair, run: Callable[[Served], dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the `key` of runs with and without exactness in turn, and the ratio of each two."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(1 + TIMES if ON_GPU else TIMES):
        for exact, values in times.items():
            value = run(pair.serves(exact=exact))[key]
            values += [value] if turn or not ON_GPU else []
    ratios = [exact / library for exact, library in zip(times[True], times[False], strict=True)]
    return {f"exact_{key}": times[True], f"library_{key}": times[False], "exact_of_library": spread(ratios)}
