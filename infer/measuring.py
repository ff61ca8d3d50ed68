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
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from infer.costs import ContextCost, CostTable, Curve
from infer.params import SamplingParams
from infer.proposers.base import Budget
from infer.request import Request

log = logging.getLogger(__name__)

VERSION = 5  # of what is measured and how
PROMPT_TOKENS = 96
LONG_TOKENS = 1024
LEAST_DIFFERENCE = 128  # between a long and a short request, or noise is all that would be seen
REPEATS = 5
ROWS_PER_REQUEST = (1, 2, 4, 6, 9, 17, 33, 64)
PLAIN_TOKENS = REPEATS + 4  # that requests emit while they are measured


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


def measure(
    engine: Measurable,
    drafters: Mapping[str, Budget],
    *,
    vocab_size: int,
    context: int,
    max_batch: int,
    max_rows: int,
) -> CostTable:
    """`drafters`: what each drafts at most per step. Takes seconds. Raises ValueError for too short a context."""
    found = measure_batches(
        engine, drafters, vocab_size=vocab_size, context=context, max_batch=max_batch, max_rows=max_rows
    )
    return replace(
        found, beyond=measure_beyond(engine, drafters, found.context, vocab_size=vocab_size, context=context)
    )


def measure_batches(
    engine: Measurable,
    drafters: Mapping[str, Budget],
    *,
    vocab_size: int,
    context: int,
    max_batch: int,
    max_rows: int,
) -> CostTable:
    """Of short requests."""
    generator = torch.Generator().manual_seed(0)
    widest = 1 + max(budget.nodes for budget in drafters.values())
    prompt_tokens = min(PROMPT_TOKENS, context - widest - PLAIN_TOKENS)
    if prompt_tokens < 1:
        raise ValueError(
            f"proposer.adaptive=true: drafts of {widest - 1} tokens leave nothing of a context of {context}; draft less"
        )
    batches, verify, around = list[int](), list[Curve](), list[float]()
    drafts: dict[str, list[Curve]] = {name: [] for name in drafters}
    for batch in (size for size in (1, 2, 4, 8, 16, 32, 64) if size <= max_batch):
        prompts = torch.randint(0, vocab_size, (batch, prompt_tokens), generator=generator).tolist()
        for name, limit in drafters.items():
            # Sampled: drafts and their rows then cost a little more, and who errs should err towards plain decoding.
            # Those whose prompts are read first decode until the others' are.
            length = min(widest + PLAIN_TOKENS + batch, context - prompt_tokens)
            params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, proposer=name)
            requests = engine.rehearse(prompts, params)
            try:
                if len(requests) < batch:  # the pool holds no more
                    return table(batches, verify, around, drafts, prompt_tokens)
                settle(engine, requests)
                drafts[name].append(draft_curve(engine, requests, limit))
                if batch not in batches:
                    curve = verify_curve(engine, requests, widest, max_rows)
                    batches.append(batch)
                    verify.append(curve)
                    around.append(max(0.0, timed([engine.step])[0] - curve.seconds[0]))
            finally:
                engine.dismiss(requests)
    return table(batches, verify, around, drafts, prompt_tokens)


def measure_beyond(
    engine: Measurable, drafters: Mapping[str, Budget], short: int, *, vocab_size: int, context: int
) -> ContextCost:
    """What tokens of context above `short` cost; nothing if the context or the pool leaves no room for many."""
    generator = torch.Generator().manual_seed(1)
    widest = 1 + max(budget.nodes for budget in drafters.values())
    length = widest + PLAIN_TOKENS + 2
    further = min(LONG_TOKENS, context - length) - short
    if further < LEAST_DIFFERENCE:
        return ContextCost()
    prompts = [torch.randint(0, vocab_size, (size,), generator=generator).tolist() for size in (short + further, short)]
    first = rest = 0.0
    levels = dict[str, float]()
    for name, limit in drafters.items():
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, proposer=name)
        requests = engine.rehearse(prompts, params)
        try:
            if len(requests) < len(prompts):
                return ContextCost()
            settle(engine, requests)
            works: list[Callable[[], object]] = []
            for own in requests:
                works += [lambda own=own, drafts=drafts: engine.try_verify([own], drafts) for drafts in (0, widest - 1)]
                works.append(lambda own=own, limit=limit: engine.try_draft([own], limit))
            seconds = timed(works)
        finally:
            engine.dismiss(requests)
        one, many, drafting = (max(0.0, a - b) / further for a, b in zip(seconds[:3], seconds[3:], strict=True))
        first, rest = one, max(0.0, many - one) / (widest - 1)
        levels[name] = drafting / limit.depth
    return ContextCost(first, rest, levels)


def settle(engine: Measurable, requests: Sequence[Request]) -> None:
    """Leaves two tokens for a drafter to read, about what there is between two drafts, instead of the prompts."""
    engine.try_draft(requests, Budget(1, 1))
    engine.step()
    engine.step()


def table(
    batches: list[int],
    verify: list[Curve],
    around: list[float],
    drafts: Mapping[str, Sequence[Curve]],
    context: int,
) -> CostTable:
    """Of the batch sizes that every drafter was measured at."""
    size = min(len(batches), *(len(own) for own in drafts.values()))
    own = {name: tuple(curves[:size]) for name, curves in drafts.items()}
    return CostTable(tuple(batches[:size]), tuple(verify[:size]), tuple(around[:size]), own, context)


def verify_curve(engine: Measurable, requests: Sequence[Request], widest: int, max_rows: int) -> Curve:
    batch = len(requests)
    widths = sorted({1, 2, widest, *(width for width in ROWS_PER_REQUEST if width <= widest)})
    widths = [width for width in widths if width <= 2 or width * batch <= max_rows]
    works = [lambda width=width: engine.try_verify(requests, width - 1) for width in widths]
    return Curve(tuple(float(batch * width) for width in widths), timed(works))


def draft_curve(engine: Measurable, requests: Sequence[Request], limit: Budget) -> Curve:
    depths = sorted({1, (limit.depth + 1) // 2, limit.depth})
    chain = limit.nodes == limit.depth
    asked = [Budget(depth if chain else limit.nodes, depth) for depth in depths]
    works = [lambda budget=budget: engine.try_draft(requests, budget) for budget in asked]
    # Between two drafts the target has filled the caches with its own weights.
    return Curve(tuple(map(float, depths)), timed(works, between=lambda: engine.try_verify(requests, 0)))


def timed(works: Sequence[Callable[[], object]], *, between: Callable[[], object] = lambda: None) -> tuple[float, ...]:
    """Seconds of each: the median of a few after one that warms up, in turns, so that a disturbance meets them all."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(1 + REPEATS):
        for work, own in zip(works, seconds, strict=True):
            between()
            begin = time.perf_counter()
            work()
            if turn:
                own.append(time.perf_counter() - begin)
    return tuple(map(statistics.median, seconds))


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
