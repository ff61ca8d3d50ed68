"""Compares speculation off and on, alternately on the same prompts: paired speed ratio, and whether any id differs.

Pure measurement: takes an engine and prompts, returns numbers. Knows nothing of printing or of where prompts come from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from infer.steps.stats import StepTimes

WARM_UP_TOKENS = 8
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    token_ids: list[list[int]]
    seconds: float
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    steps: StepTimes | None = None  # of our engine

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Pair:
    off: Run
    on: Run

    @property
    def identical(self) -> bool:
        return self.off.token_ids == self.on.token_ids

    @property
    def ratio(self) -> float:
        return self.on.tokens_per_s / self.off.tokens_per_s


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Comparison:
    pairs: list[Pair]

    @property
    def identical(self) -> bool:
        return all(pair.identical for pair in self.pairs)

    @property
    def ratio(self) -> Spread:
        return Spread.of([pair.ratio for pair in self.pairs])

    @property
    def tokens(self) -> int:
        return sum(pair.on.tokens for pair in self.pairs)

    @property
    def off_tokens_per_s(self) -> float:
        return sum(pair.off.tokens for pair in self.pairs) / sum(pair.off.seconds for pair in self.pairs)

    @property
    def on_tokens_per_s(self) -> float:
        return self.tokens / sum(pair.on.seconds for pair in self.pairs)

    @property
    def speculation(self) -> SpeculationStats:
        total = SpeculationStats()
        for pair in self.pairs:
            total.merge(pair.on.speculation)
        return total


def compare(engine: Engine, groups: Sequence[Prompts], params: SamplingParams) -> Iterator[Pair]:
    """Yield a pair per group of prompts that run together. "on" is the engine's proposer, which stays in place."""
    proposer = engine.proposer_name
    assert proposer != "none", "nothing to compare"
    try:
        for group in groups:
            yield Pair(off=timed(engine, "none", group, params), on=timed(engine, proposer, group, params))
    finally:
        engine.set_proposer(proposer)


def timed(
    engine: Engine,
    proposer: str,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    max_concurrency: int | None = None,
    **drafts: Any,
) -> Run:
    """Run the prompts with a proposer; `drafts` are further arguments of `Engine.set_proposer`."""
    engine.set_proposer(proposer, **drafts)
    # Switching proposers allocates new memory; its first use must not be part of the measurement.
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    short = [replace(one, max_tokens=min(WARM_UP_TOKENS, one.max_tokens)) for one in each[:max_concurrency]]
    engine.generate(prompts[:max_concurrency], short)
    before, begin = replace(engine.stats.steps), time.perf_counter()
    completions = engine.generate(prompts, each, max_concurrency=max_concurrency)
    seconds = time.perf_counter() - begin
    speculation = SpeculationStats()
    for completion in completions:
        speculation.merge(completion.stats)
    return Run([completion.token_ids for completion in completions], seconds, speculation, engine.stats.steps - before)
