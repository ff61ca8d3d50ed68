"""Profiler: fills the cost table (cost_model.py) by running steps, and stores it for the next start.

Requests of random tokens are decoded for a moment at one batch size after another: verifies of more and more rows,
which commit nothing, and drafts of growing depth, which a proposer can repeat any number of times. Where steps run as
CUDA graphs, these are replayed instead (infer/graphs/replay.py), and only batch sizes that have graphs are measured.

Start-up waits no longer than START_S for it, and not at all where `Engine.profile` does it later. Larger batch sizes
are left out if there is no time for them, and nothing is kept if times are not repeatable or contradict each other
because the machine is busy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from infer.batch.params import SamplingParams
from infer.batch.tree import Budget
from infer.engine.startup.profiled_engine import ProfiledEngine
from infer.graphs.replay import Replays, replays_of
from infer.request import Request
from infer.speculation.control.cost_model import SETTLES_S, CostTable, Curve, contradiction
from kernels.cache import cache_file, placed

log = logging.getLogger(__name__)

VERSION = 18  # of what is measured and how
# Seconds that start-up waits for all of it, apart from the work running at that time: a few seconds.
START_S = 4.5
PROMPT_TOKENS = 64  # of profiled requests: a page or more, while longer ones take the time of larger batches
REPEATS = 20  # runs of a work at most: SETTLES_S hold as many steps of 1.3 ms, the shortest known (curves-demo_*.json)
# Ratio within which the two shortest times of a work must lie, or something disturbed it: between what steps vary by, a
# tenth, and what a busy second core does to them, a factor (docs/log/2026-11.md, "Why do streams stall").
REPEATABLE = 1.25


class Unmeasured(Exception):
    """This machine is too slow, too busy or too small to be measured in the time that start-up may wait."""


class OutOfTime(Unmeasured):
    """It takes longer than start-up may wait."""


def measure(
    engine: ProfiledEngine,
    drafters: Mapping[str, Budget],
    *,
    vocab_size: int,
    context: int,
    max_batch: int,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
    check: Callable[[], None] = lambda: None,
) -> CostTable:
    """Measure the cost table. `drafters`: the largest budget of each per step.

    `check` is called every few steps; what it raises ends the profiling. Raises Unmeasured if too little fits into the
    context or the cache, or if no reliable table can be obtained within START_S.
    """
    widest = 1 + max(budget.nodes for budget in drafters.values())
    room = context - widest - tokens(widest, 1)
    if room < 1:
        raise Unmeasured(f"drafts of {widest - 1} tokens leave nothing of a context of {context}")
    watch = Stopwatch(clock, check)
    profiler = Profiler(engine, watch, min(PROMPT_TOKENS, room), vocab_size, widest, max_rows)
    replays = replays_of(engine.overlap, drafters, profiler.length + tokens(widest, max_batch))
    most = max_batch if replays is None else replays.largest
    measured = list[tuple[int, Curve, dict[str, Curve]]]()
    for batch in (2**power for power in range(most.bit_length())):
        began = watch.left
        try:
            curves = profiler.curves(batch, drafters, replays)
        except OutOfTime:
            if not measured:
                raise
            break
        if curves is None:  # no more requests fit
            break
        measured.append((batch, *curves))
        if 2 * (began - watch.left) > watch.left:  # what twice as many requests would take
            break
    if not measured:
        raise Unmeasured(f"no request of {profiler.length} tokens fits in the cache of keys and values")
    batches, steps, drafts = zip(*measured, strict=True)
    by_drafter = {name: tuple(curves[name] for curves in drafts) for name in drafters}
    table = CostTable(batches, steps, by_drafter, profiler.reads)
    if reason := contradiction(table):
        raise Unmeasured(reason)
    return table


def tokens(widest: int, count: int) -> int:
    """Return the largest number of tokens that each of `count` requests emits or drafts while it is profiled."""
    return widest + REPEATS + 4 + count


def counts_up_to(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... and `most`: densest where a row more matters most."""
    halves = (count for power in range(most.bit_length()) for count in (2**power, 3 * 2**power))
    return sorted({most, *(count for count in halves if count <= most)})


class Stopwatch:
    """Times works by a clock until START_S have passed. `check` may raise to end the profiling earlier."""

    def __init__(self, clock: Callable[[], float], check: Callable[[], None] = lambda: None) -> None:
        self.clock, self._check, self._end = clock, check, clock() + START_S

    @property
    def left(self) -> float:
        return self._end - self.clock()

    def check(self) -> None:
        self._check()
        if self.left <= 0:
            raise OutOfTime(f"it takes longer than {START_S:g} s")

    def time(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Return the shortest time of several runs of `work`, with an untimed run of `before` ahead of each.

        It runs until the machine has settled into it and the shortest time was nearly reached twice. Raises Unmeasured
        if that does not happen.
        """
        seconds, began = list[float](), self.clock()
        while len(seconds) < 3 or (
            len(seconds) < REPEATS and (self.clock() - began < SETTLES_S or not repeatable(seconds))
        ):
            self.check()
            before()
            begin = self.clock()
            work()
            seconds.append(self.clock() - begin)
        if not repeatable(seconds):
            raise Unmeasured("timings are not reproducible")
        return min(seconds)


def repeatable(seconds: Sequence[float]) -> bool:
    """Return whether the shortest of these times was nearly reached a second time."""
    first, second = sorted(seconds)[:2]
    return second <= REPEATABLE * first


class Profiler:
    """Times the parts of steps of requests of random tokens that exist only while they are profiled."""

    def __init__(
        self, engine: ProfiledEngine, watch: Stopwatch, length: int, vocab_size: int, widest: int, max_rows: int
    ) -> None:
        self._engine, self._watch, self.length = engine, watch, length
        self._widest, self._max_rows = widest, max_rows  # rows of one request, and of all in a step
        self._vocab_size, self._generator = vocab_size, torch.Generator().manual_seed(0)
        self.reads = dict[str, float]()  # by drafter: seconds per token of a prompt

    def curves(
        self, batch: int, drafters: Mapping[str, Budget], replays: Replays | None
    ) -> tuple[Curve, dict[str, Curve]] | None:
        """Return the seconds of a step over its rows, and of each drafter over its depth, for this many requests.

        None if so many do not fit.
        """
        step, drafts = None, dict[str, Curve]()
        for name, limit in drafters.items():
            with self.requests(name, batch) as requests:
                if len(requests) < batch:
                    return None
                if replays is not None:
                    step, drafts[name] = replays.curves(requests, limit, self._watch.time)
                else:
                    step = step or self.steps(requests)
                    drafts[name] = self.drafts(requests, limit)
                if name not in self.reads:
                    self.reads[name] = self.reading(requests)
        assert step is not None, "there is a drafter"
        return step, drafts

    @contextmanager
    def requests(self, name: str, count: int) -> Iterator[list[Request]]:
        """Yield decoding requests drafted for by `name`; fewer if no more fit.

        Each has two tokens for the drafter to read, about as many as there are between two drafts.
        """
        prompts = torch.randint(0, self._vocab_size, (count, self.length), generator=self._generator).tolist()
        # Sampled: drafts and their rows then cost a little more, and an error should favour plain decoding. Requests
        # that are prefilled first decode until the others are prefilled too.
        params = SamplingParams(temperature=1.0, max_tokens=tokens(self._widest, count), ignore_eos=True, proposer=name)
        with self._engine.decoding(prompts, params, self._watch.check) as requests:
            if requests:
                self._engine.draft(requests, Budget(1, 1))
                self._engine.step()
                self._engine.step()
            yield requests

    def steps(self, requests: Sequence[Request]) -> Curve:
        """Return the seconds of steps without drafting, over their rows: a plain step, and verifies of more rows."""
        batch = len(requests)
        widths = [n for n in counts_up_to(self._widest) if n <= 2 or n * batch <= self._max_rows]
        verifies = [self._watch.time(lambda: self._engine.verify(requests, n - 1)) for n in widths]  # noqa: B023
        around = max(0.0, self._watch.time(self._engine.step) - verifies[0])  # all that a step does beside
        return Curve(tuple(float(batch * n) for n in widths), tuple(seconds + around for seconds in verifies))

    def drafts(self, requests: Sequence[Request], limit: Budget) -> Curve:
        """Return the seconds of drafting over its depth. As in use, the target has run before."""
        depths, seconds = sorted({1, (limit.depth + 1) // 2, limit.depth}), list[float]()
        for depth in depths:
            budget = Budget(depth if limit.is_chain else limit.nodes, depth)
            seconds.append(self._time_drafter(lambda: self._engine.draft(requests, budget), requests))  # noqa: B023
        return Curve(tuple(map(float, depths)), tuple(seconds))

    def reading(self, requests: Sequence[Request]) -> float:
        """Return the drafter's seconds per token of a prompt."""
        seconds = self._time_drafter(lambda: self._engine.prefill_drafter(requests), requests)
        return seconds / sum(request.computed for request in requests)

    def _time_drafter(self, work: Callable[[], object], requests: Sequence[Request]) -> float:
        return self._watch.time(work, before=lambda: self._engine.verify(requests, 0))


def kept_table(key: Mapping[str, object], make: Callable[[], CostTable]) -> CostTable:
    """Return the table stored earlier under the same `key`, or a new one, which is stored.

    A stored table that is damaged or contradicts itself is measured again.
    """
    digest = hashlib.sha256(json.dumps({"version": VERSION, **key}, sort_keys=True).encode()).hexdigest()[:24]
    file = cache_file(f"costs-{digest}.json")
    try:
        table = CostTable.from_json(json.loads(file.read_text(encoding="utf-8"))["table"])
        if not (reason := contradiction(table)):
            return table
        log.warning("%s: the stored costs are inconsistent (%s) and are measured again", file, reason)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = make()
    try:
        with placed(file) as part:
            part.write_text(json.dumps({"key": dict(key), "table": asdict(measured)}), encoding="utf-8")
    except OSError as error:
        log.warning("%s: could not store the measured costs; every start will measure them again: %s", file, error)
    return measured
