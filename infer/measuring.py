"""Fills the table of what steps cost (infer/costs.py) by running them, and keeps it for the next start.

Requests of random tokens are decoded for a moment at several batch sizes: verifies of more and more rows, which commit
nothing, and drafts of growing depth, which a proposer may be asked for again and again. What a long context adds is
told from a long and a short request in turns.
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

from infer.budget import Budget
from infer.costs import ContextCost, CostTable, Curve
from infer.params import SamplingParams
from infer.request import Request

log = logging.getLogger(__name__)

VERSION = 13  # of what is measured and how
PROMPT_TOKENS = 96
LONG_TOKENS = 1024
# Seconds for which a work is run again and again before the next one's turn: after a large one a small one is slower by
# half for some milliseconds, as it never is among its like (LOG.md).
SETTLES = 0.012
LEAST_DIFFERENCE = 128  # between a long and a short request, or noise is all that would be seen
REPEATS, MOST_REPEATS, SECONDS = 5, 20, 4.0  # more than the least as long as all together take so long
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROWS_PER_REQUEST = (1, 2, 3, 4, 6, 9, 17, 33, 64)
PLAIN_TOKENS = MOST_REPEATS + 4  # that requests emit while they are measured


class Measurable(Protocol):
    """What an engine lets be timed."""

    def rehearse(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
        """Begins requests and brings them to decoding; fewer than asked for if no more fit beside each other, or if
        the first had ended when the last began.
        """
        ...

    def dismiss(self, requests: Sequence[Request]) -> None:
        """Ends them, as if they had never been."""
        ...

    def step(self) -> object:
        """Without drafts, while requests are rehearsed."""
        ...

    def try_verify(self, requests: Sequence[Request], drafts: int) -> None: ...

    def try_draft(self, requests: Sequence[Request], budget: Budget) -> None: ...

    def try_read(self, requests: Sequence[Request]) -> None:
        """Their drafter reads all that is committed of them. What it drafts from then on is worth nothing."""
        ...


def measure(
    engine: Measurable,
    drafters: Mapping[str, Budget],
    *,
    vocab_size: int,
    context: int,
    max_batch: int,
    max_rows: int,
) -> CostTable:
    """`drafters`: what each drafts at most per step. Takes seconds. Raises ValueError if too little fits."""
    widest = 1 + max(budget.nodes for budget in drafters.values())
    short = min(PROMPT_TOKENS, context - widest - PLAIN_TOKENS)
    if short < 1:
        raise ValueError(
            f"proposer.adaptive=true: drafts of {widest - 1} tokens leave nothing of a context of {context}; draft less"
        )
    rehearsals = Rehearsals(engine, vocab_size, context, widest)
    found = measure_batches(rehearsals, drafters, short, max_batch=max_batch, max_rows=max_rows)
    return replace(found, beyond=measure_beyond(rehearsals, drafters, short))


class Work(NamedTuple):
    """What is to be timed, and what is to be done before it each time."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    again: bool = True  # whether it may be run more than once a turn


class Rehearsals:
    """Requests of random tokens, for as long as they are measured."""

    def __init__(self, engine: Measurable, vocab_size: int, context: int, widest: int) -> None:
        self.engine, self.context, self.widest = engine, context, widest
        self._vocab_size, self._generator = vocab_size, torch.Generator().manual_seed(0)

    @contextmanager
    def of(self, name: str, lengths: Sequence[int]) -> Iterator[list[Request]]:
        """Of so many prompt tokens each, the longest first, drafted for by `name`; fewer if no more fit.

        They have two tokens for the drafter to read, about what there is between two drafts.
        """
        prompts = [torch.randint(0, self._vocab_size, (n,), generator=self._generator).tolist() for n in lengths]
        # Sampled: drafts and their rows then cost a little more, and who errs should err towards plain decoding. Those
        # whose prompts are read first decode until the others' are.
        room = min(self.tokens(len(lengths)), self.context - lengths[0])
        params = SamplingParams(temperature=1.0, max_tokens=room, ignore_eos=True, proposer=name)
        requests = self.engine.rehearse(prompts, params)
        try:
            if requests:
                self.engine.try_draft(requests, Budget(1, 1))
                self.engine.step()
                self.engine.step()
            yield requests
        finally:
            self.engine.dismiss(requests)

    def tokens(self, count: int) -> int:
        """That each of so many requests emits or drafts at most."""
        return self.widest + PLAIN_TOKENS + count


def measure_batches(
    rehearsals: Rehearsals, drafters: Mapping[str, Budget], length: int, *, max_batch: int, max_rows: int
) -> CostTable:
    """Of requests of one `length`, all sizes of a batch in turns: a machine that others use is slow for seconds."""
    engine, most = rehearsals.engine, max(size for size in BATCHES if size <= max_batch)
    batches, verify, around = BATCHES, list[Curve](), Curve((1.0,), (0.0,))
    drafts, reads = dict[str, list[Curve]](), dict[str, float]()
    for name, limit in drafters.items():
        with rehearsals.of(name, [length] * most) as requests:
            if not requests:
                raise ValueError(
                    f"proposer.adaptive=true: no request of {length} tokens fits in the cache of keys and values"
                )
            batches = tuple(size for size in batches if size <= len(requests))
            parts = [requests[:size] for size in batches]
            rows = [widths(size, rehearsals.widest, max_rows) for size in batches]
            depths = sorted({1, (limit.depth + 1) // 2, limit.depth})
            works = [verifying(engine, own, width) for own, sizes in zip(parts, rows, strict=True) for width in sizes]
            works += [drafting(engine, own, limit, depth) for own in parts for depth in depths]
            seconds = iter(timed(works))
            verify = [
                Curve(tuple(float(size * width) for width in sizes), tuple(next(seconds) for _ in sizes))
                for size, sizes in zip(batches, rows, strict=True)
            ]
            drafts[name] = [Curve(tuple(map(float, depths)), tuple(next(seconds) for _ in depths)) for _ in batches]
            several = len(requests), rest_of_step(engine, requests)
        with rehearsals.of(name, [length]) as requests:
            around = between((1, rest_of_step(engine, requests)), several)
            reads[name] = seconds_of_reading(engine, requests)
    count = len(batches)
    own = {name: tuple(curves[:count]) for name, curves in drafts.items()}
    beside = tuple(around(float(size)) for size in batches)
    return CostTable(batches, tuple(verify), beside, own, length, reads=reads)


def widths(batch: int, widest: int, max_rows: int) -> list[int]:
    """Rows of each request that are tried."""
    found = sorted({1, 2, widest, *(width for width in ROWS_PER_REQUEST if width <= widest)})
    return [width for width in found if width <= 2 or width * batch <= max_rows]


def verifying(engine: Measurable, requests: Sequence[Request], rows: int) -> Work:
    return Work(lambda: engine.try_verify(requests, rows - 1))


def drafting(engine: Measurable, requests: Sequence[Request], limit: Budget, depth: int) -> Work:
    budget = Budget(depth if limit.is_chain else limit.nodes, depth)
    # Between two drafts the target has filled the caches with its own weights.
    return Work(lambda: engine.try_draft(requests, budget), lambda: engine.try_verify(requests, 0))


def rest_of_step(engine: Measurable, requests: Sequence[Request]) -> float:
    """Seconds of a plain step of all these beside its verify."""
    step, verify = timed([Work(engine.step, again=False), verifying(engine, requests, 1)])
    return max(0.0, step - verify)


def seconds_of_reading(engine: Measurable, requests: Sequence[Request]) -> float:
    """Of each token, after the target has filled the caches."""
    (seconds,) = timed([Work(lambda: engine.try_read(requests), lambda: engine.try_verify(requests, 0))])
    return seconds / sum(request.computed for request in requests)


def between(left: tuple[int, float], right: tuple[int, float]) -> Curve:
    """The line through two points, or the one point that both are."""
    points = [left] if left[0] == right[0] else [left, right]
    return Curve(tuple(float(size) for size, _ in points), tuple(seconds for _, seconds in points))


def measure_beyond(rehearsals: Rehearsals, drafters: Mapping[str, Budget], short: int) -> ContextCost:
    """What tokens of context above `short` cost; nothing if the context or the pool leaves no room for many."""
    engine, widest = rehearsals.engine, rehearsals.widest
    further = min(LONG_TOKENS, rehearsals.context - rehearsals.tokens(2)) - short
    if further < LEAST_DIFFERENCE:
        return ContextCost()
    first = rest = 0.0
    levels = dict[str, float]()
    for name, limit in drafters.items():
        with rehearsals.of(name, [short + further, short]) as requests:
            if len(requests) < 2:
                return ContextCost()
            works: list[Work] = []
            for own in requests:
                works += [verifying(engine, [own], rows) for rows in (1, widest)]
                works.append(drafting(engine, [own], limit, limit.depth))
            seconds = timed(works)
        one, many, drafts = (max(0.0, a - b) / further for a, b in zip(seconds[:3], seconds[3:], strict=True))
        first, rest = one, max(0.0, many - one) / (widest - 1)
        levels[name] = drafts / limit.depth
    return ContextCost(first, rest, levels)


def timed(works: Sequence[Work]) -> tuple[float, ...]:
    """Seconds of each: the least of some after one that warms up, in turns, so that a disturbance meets them all."""
    seconds: list[list[float]] = [[] for _ in works]
    start = time.perf_counter()
    for turn in range(1 + MOST_REPEATS):
        if turn > REPEATS and time.perf_counter() - start > SECONDS:
            break
        for work, own in zip(works, seconds, strict=True):
            begin = time.perf_counter()
            runs = [seconds_of(work)]
            while work.again and time.perf_counter() - begin < SETTLES:
                runs.append(seconds_of(work))
            if turn:
                own.append(min(runs))
    return tuple(map(min, seconds))


def seconds_of(work: Work) -> float:
    work.before()
    begin = time.perf_counter()
    work.run()
    return time.perf_counter() - begin


def kept_table(folder: Path, key: Mapping[str, Any], make: Callable[[], CostTable]) -> CostTable:
    """The table measured earlier under the same `key`, or a new one, which is kept. A damaged file is made anew."""
    digest = hashlib.sha256(json.dumps({"version": VERSION, **key}, sort_keys=True).encode()).hexdigest()[:24]
    file = folder / f"costs-{digest}.json"
    try:
        return CostTable.from_json(json.loads(file.read_text(encoding="utf-8"))["table"])
    except (OSError, ValueError, KeyError, TypeError):
        found = make()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"key": dict(key), "table": found.to_json()}, stream)
        os.replace(temporary, file)
    except OSError as error:
        log.warning("%s: what a step costs could not be kept, and is measured at every start: %s", file, error)
    return found
