"""Profiler: fills the cost table (cost_model.py) by running steps, and stores it for the next start.

Requests of random tokens are decoded for a moment at several batch sizes: verifies of more and more rows, which commit
nothing, and drafts of growing depth, which a proposer can repeat any number of times. What a long context adds is
measured with a long and a short request in turns.

Start-up waits no longer than START_S for it, and not at all where `Engine.profile` does it later. Fewer batch sizes are
measured if there is no time for all, and nothing if times are not repeatable or contradict each other because the
machine is busy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from infer.request import Request
from infer.sampling.params import SamplingParams
from infer.speculation.budget import Budget
from infer.speculation.control.cost_model import ContextCost, CostTable, Curve, contradiction

log = logging.getLogger(__name__)


class Unmeasured(Exception):
    """This machine is too slow or too busy to be measured in the time that start-up may wait."""


VERSION = 14  # of what is measured and how
PROMPT_TOKENS = 96
LONG_TOKENS = 1024
# Seconds for which a work is repeated before the next one's turn: after a large work a small one is slower by half for
# some milliseconds, which it never is after others of its size (LOG.md).
SETTLES = 0.012
MIN_DIFFERENCE = 128  # in tokens, between a long and a short request; a smaller one would be lost in noise
REPEATS, MAX_REPEATS = 2, 20  # least and most timed turns of each work, after one warm-up turn
START_S = 4.5  # that start-up waits for all measurements, apart from the work running at that time
REPEATS_WITHIN = 1.25  # the two shortest times of a work must lie within this ratio, or something disturbed it
CHUNK_ROWS = 4  # least number of prompt rows that are prefilled in the time of one plain step
# Shares of the time left: for one request; for all batch sizes; for what follows.
ONE_SHARE, BATCHES_SHARE, REST_SHARE = 0.04, 0.55, 0.2
READING_SHARE = 0.5  # of the time left, that the prefill of long prompts may take
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROWS_PER_REQUEST = (1, 2, 3, 4, 6, 9, 17, 33, 64)
PLAIN_TOKENS = MAX_REPEATS + 4  # that requests emit while they are measured


class Measurable(Protocol):
    """The part of an engine that the profiler times."""

    def start(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, check: Callable[[], None]
    ) -> list[Request]:
        """Start requests and bring them to decoding; return them.

        These are fewer than `prompts` if no more fit at the same time, or if the first had ended when the last began.
        `check` is called between steps; if it raises, none of the requests is left.
        """
        ...

    def discard(self, requests: Sequence[Request]) -> None:
        """End the requests, leaving no trace of them."""
        ...

    def step(self) -> object:
        """Run one step, without drafts while requests are profiled."""
        ...

    def verify(self, requests: Sequence[Request], drafts: int) -> None: ...

    def draft(self, requests: Sequence[Request], budget: Budget) -> None: ...

    def prefill_drafter(self, requests: Sequence[Request]) -> None:
        """Make the drafter read all committed positions of the requests. What it drafts from then on is worthless."""
        ...


def measure(
    engine: Measurable,
    drafters: Mapping[str, Budget],
    *,
    vocab_size: int,
    context: int,
    max_batch: int,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
    limit_s: float = START_S,
    check: Callable[[], None] = lambda: None,
) -> CostTable:
    """Measure the cost table. `drafters`: the largest budget of each per step.

    `check` is called every few steps; what it raises ends the profiling. Raises ValueError if too little fits into the
    context or the cache, Unmeasured if no reliable table can be obtained within `limit_s`.
    """
    widest = 1 + max(budget.nodes for budget in drafters.values())
    short = min(PROMPT_TOKENS, context - widest - PLAIN_TOKENS)
    if short < 1:
        raise ValueError(
            f"proposer.adaptive=true: drafts of {widest - 1} tokens leave nothing of a context of {context}; draft less"
        )
    watch = Stopwatch(clock, limit_s, check)
    profiled = ProfiledRequests(engine, watch, vocab_size, context, widest, max_rows)
    began = clock()
    with profiled.of(next(iter(drafters)), [1]):
        step = (clock() - began) / 4  # a prefill, a draft and two steps
    if step * short / CHUNK_ROWS > watch.left:
        raise Unmeasured(f"a step takes {step:.2g} s")
    table = measure_batches(profiled, drafters, short, max_batch)
    table = replace(table, beyond=measure_beyond(profiled, drafters, short))
    if reason := contradiction(table):
        raise Unmeasured(reason)
    return table


class Work(NamedTuple):
    """A function to be timed, and one that runs before it each time."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    again: bool = True  # whether it may run more than once per turn


class Stopwatch:
    """Times works by a clock, up to a time limit. `check` may raise to end the profiling earlier."""

    def __init__(self, clock: Callable[[], float], limit_s: float, check: Callable[[], None] = lambda: None) -> None:
        self.clock, self._limit, self._end = clock, limit_s, clock() + limit_s
        self._check = check

    @property
    def left(self) -> float:
        return self._end - self.clock()

    def check(self) -> None:
        self._check()
        if self.left <= 0:
            raise Unmeasured(f"it takes longer than {self._limit:g} s")

    def timed(self, works: Sequence[Work], share: float) -> tuple[float, ...]:
        """Return the seconds of each work: the shortest of some turns after a warm-up turn.

        Works take turns, so that a disturbance affects all of them. Goes on for `share` of the time left, and longer
        until the shortest time of each was nearly reached twice. Raises Unmeasured if that does not happen.
        """
        seconds: list[list[float]] = [[] for _ in works]
        until = self.clock() + share * self.left
        for turn in range(1 + MAX_REPEATS):
            if turn > REPEATS and self.clock() > until and all(map(repeats, seconds)):
                break
            for work, times in zip(works, seconds, strict=True):
                self.check()
                begin = self.clock()
                runs = [self._seconds_of(work)]
                while work.again and self.clock() - begin < SETTLES:
                    runs.append(self._seconds_of(work))
                if turn:
                    times.append(min(runs))
        if not all(map(repeats, seconds)):
            raise Unmeasured("timings are not reproducible")
        return tuple(map(min, seconds))

    def _seconds_of(self, work: Work) -> float:
        work.before()
        begin = self.clock()
        work.run()
        return self.clock() - begin


def repeats(seconds: Sequence[float]) -> bool:
    """Return whether the shortest of these times was nearly reached a second time."""
    first, second = sorted(seconds)[:2]
    return second <= REPEATS_WITHIN * first


class ProfiledRequests:
    """Requests of random tokens that exist only while they are profiled."""

    def __init__(
        self, engine: Measurable, watch: Stopwatch, vocab_size: int, context: int, widest: int, max_rows: int
    ) -> None:
        self.engine, self.watch, self.context = engine, watch, context
        self.widest, self.max_rows = widest, max_rows  # rows of one request, and of all in a step
        self.reading_s = 0.0  # seconds per prompt token, when requests were last started
        self._vocab_size, self._generator = vocab_size, torch.Generator().manual_seed(0)

    @contextmanager
    def of(self, name: str, lengths: Sequence[int]) -> Iterator[list[Request]]:
        """Yield requests of these prompt lengths, the longest first, drafted for by `name`; fewer if no more fit.

        Each has two tokens for the drafter to read, about as many as there are between two drafts.
        """
        prompts = [torch.randint(0, self._vocab_size, (n,), generator=self._generator).tolist() for n in lengths]
        # Sampled: drafts and their rows then cost a little more, and an error should favour plain decoding. Requests
        # that are prefilled first decode until the others are prefilled too.
        room = min(self.tokens(len(lengths)), self.context - lengths[0])
        params = SamplingParams(temperature=1.0, max_tokens=room, ignore_eos=True, proposer=name)
        began = self.watch.clock()
        requests = self.engine.start(prompts, params, self.watch.check)
        self.reading_s = (self.watch.clock() - began) / sum(lengths)
        try:
            if requests:
                self.engine.draft(requests, Budget(1, 1))
                self.engine.step()
                self.engine.step()
            yield requests
        finally:
            self.engine.discard(requests)

    def tokens(self, count: int) -> int:
        """Return the largest number of tokens that each of `count` requests emits or drafts."""
        return self.widest + PLAIN_TOKENS + count


class Measured(NamedTuple):
    """Costs of one drafter and the target by batch size: curves over rows and over depths.

    `around` is what a plain step takes beside its verify, at the largest size.
    """

    batches: tuple[int, ...]
    verify: tuple[Curve, ...]
    drafts: tuple[Curve, ...]
    around: float


def measure_batches(
    profiled: ProfiledRequests, drafters: Mapping[str, Budget], length: int, max_batch: int
) -> CostTable:
    """Measure requests of one `length`, at as many batch sizes as there is time for."""
    watch, sizes = profiled.watch, tuple(size for size in BATCHES if size <= max_batch)
    drafts, reads = dict[str, tuple[Curve, ...]](), dict[str, float]()
    single_around, costs = 0.0, Measured((), (), (), 0.0)
    for num_left, (name, limit) in zip(range(len(drafters), 0, -1), drafters.items(), strict=True):
        with profiled.of(name, [length]) as requests:
            if not requests:
                raise ValueError(
                    f"proposer.adaptive=true: no request of {length} tokens fits in the cache of keys and values"
                )
            costs = measure_sizes(profiled, requests, limit, (1,), ONE_SHARE / num_left)
            single_around = costs.around
            reads[name] = seconds_of_reading(profiled, requests)
        budget, single = BATCHES_SHARE * watch.left / num_left, costs
        sizes = tuple(
            size for size in sizes if size == 1 or expected_seconds(profiled, single, sizes, size, length) <= budget
        )
        if len(sizes) > 1:
            with profiled.of(name, [length] * sizes[-1]) as requests:
                sizes = tuple(size for size in sizes if size <= len(requests))
                if len(sizes) > 1:
                    costs = measure_sizes(profiled, requests, limit, sizes, BATCHES_SHARE / num_left)
        drafts[name] = costs.drafts
    around = between((1, single_around), (max(sizes), costs.around))
    curves = {name: curves_by_size[: len(sizes)] for name, curves_by_size in drafts.items()}
    return CostTable(sizes, costs.verify, tuple(around(float(size)) for size in sizes), curves, length, reads=reads)


def measure_sizes(
    profiled: ProfiledRequests,
    requests: Sequence[Request],
    limit: Budget,
    sizes: tuple[int, ...],
    share: float,
) -> Measured:
    """Measure all batch sizes in turns, since a shared machine is slow for seconds at a time."""
    engine, watch = profiled.engine, profiled.watch
    parts = [requests[:size] for size in sizes]
    rows = [widths(size, profiled.widest, profiled.max_rows) for size in sizes]
    depths = sorted({1, (limit.depth + 1) // 2, limit.depth})
    works = [verifying(engine, part, width) for part, counts in zip(parts, rows, strict=True) for width in counts]
    works += [drafting(engine, part, limit, depth) for part in parts for depth in depths]
    seconds = iter(watch.timed(works, share))
    verify = [
        Curve(tuple(float(size * width) for width in counts), tuple(next(seconds) for _ in counts))
        for size, counts in zip(sizes, rows, strict=True)
    ]
    drafts = [Curve(tuple(map(float, depths)), tuple(next(seconds) for _ in depths)) for _ in sizes]
    step, bare = watch.timed([Work(engine.step, again=False), verifying(engine, requests, 1)], ONE_SHARE)
    return Measured(sizes, tuple(verify), tuple(drafts), max(0.0, step - bare))


def expected_seconds(
    profiled: ProfiledRequests, single: Measured, sizes: Sequence[int], largest: int, length: int
) -> float:
    """Return the expected seconds of measuring all `sizes` up to the `largest`, from what a `single` request cost."""
    (verify,), (draft,) = single.verify, single.drafts
    turn = 0.0
    for size in (size for size in sizes if size <= largest):
        rows = [float(size * width) for width in widths(size, profiled.widest, profiled.max_rows)]
        turn += sum(max(SETTLES, verify(count)) for count in rows)
        growth = max(1.0, verify(float(size)) / verify(1.0))
        turn += sum(max(SETTLES, growth * seconds) for seconds in draft.seconds)
    return profiled.reading_s * length * largest + (1 + REPEATS) * turn


def widths(batch: int, widest: int, max_rows: int) -> list[int]:
    """Return the numbers of rows per request that are tried."""
    counts = sorted({1, 2, widest, *(width for width in ROWS_PER_REQUEST if width <= widest)})
    return [width for width in counts if width <= 2 or width * batch <= max_rows]


def verifying(engine: Measurable, requests: Sequence[Request], rows: int) -> Work:
    return Work(lambda: engine.verify(requests, rows - 1))


def drafting(engine: Measurable, requests: Sequence[Request], limit: Budget, depth: int) -> Work:
    budget = Budget(depth if limit.is_chain else limit.nodes, depth)
    # As between two drafts in use, the target has filled the caches with its weights.
    return Work(lambda: engine.draft(requests, budget), lambda: engine.verify(requests, 0))


def seconds_of_reading(profiled: ProfiledRequests, requests: Sequence[Request]) -> float:
    """Return the drafter's seconds per token of a prompt, after the target has filled the caches."""
    engine = profiled.engine
    (seconds,) = profiled.watch.timed(
        [Work(lambda: engine.prefill_drafter(requests), lambda: engine.verify(requests, 0))], ONE_SHARE
    )
    return seconds / sum(request.computed for request in requests)


def between(left: tuple[int, float], right: tuple[int, float]) -> Curve:
    """Return the line through two points, or one point if both are at the same size."""
    points = [left] if left[0] == right[0] else [left, right]
    return Curve(tuple(float(size) for size, _ in points), tuple(seconds for _, seconds in points))


def measure_beyond(profiled: ProfiledRequests, drafters: Mapping[str, Budget], short: int) -> ContextCost:
    """Measure what context tokens above `short` cost; zero if context, pool or time leave no room for many."""
    engine, widest = profiled.engine, profiled.widest
    further = min(LONG_TOKENS, profiled.context - profiled.tokens(2)) - short
    reading = profiled.reading_s * (further + 2 * short) * len(drafters)
    if further < MIN_DIFFERENCE or reading > READING_SHARE * profiled.watch.left:
        return ContextCost()
    first = rest = 0.0
    levels = dict[str, float]()
    for name, limit in drafters.items():
        with profiled.of(name, [short + further, short]) as requests:
            if len(requests) < 2:
                return ContextCost()
            works: list[Work] = []
            for request in requests:
                works += [verifying(engine, [request], rows) for rows in (1, widest)]
                works.append(drafting(engine, [request], limit, limit.depth))
            seconds = profiled.watch.timed(works, REST_SHARE)
        one, many, drafts = (max(0.0, a - b) / further for a, b in zip(seconds[:3], seconds[3:], strict=True))
        first, rest = one, max(0.0, many - one) / (widest - 1)
        levels[name] = drafts / limit.depth
    return ContextCost(first, rest, levels)


def kept_table(folder: Path, key: Mapping[str, Any], make: Callable[[], CostTable]) -> CostTable:
    """Return the table stored earlier under the same `key`, or a new one, which is stored.

    A stored table that is damaged or contradicts itself is measured again.
    """
    digest = hashlib.sha256(json.dumps({"version": VERSION, **key}, sort_keys=True).encode()).hexdigest()[:24]
    file = folder / f"costs-{digest}.json"
    try:
        table = CostTable.from_json(json.loads(file.read_text(encoding="utf-8"))["table"])
        if not (reason := contradiction(table)):
            return table
        log.warning("%s: the stored costs are inconsistent (%s) and are measured again", file, reason)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = make()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"key": dict(key), "table": measured.to_json()}, stream)
        os.replace(temporary, file)
    except OSError as error:
        log.warning("%s: could not store the measured costs; every start will measure them again: %s", file, error)
    return measured
