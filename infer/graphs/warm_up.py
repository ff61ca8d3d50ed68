"""Compiles kernels before the first request, by running requests of every kind through the steps that the host runs.

Triton compiles a kernel at its first launch, which takes from a tenth of a second to a few, and every stream would wait
for it. It compiles one for each size of tiles, which follow from the number of rows, and for each way of sampling. What
CUDA graphs capture is compiled then; this is for prompts, and for requests that need the host between two steps.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm

from infer.batch.params import MAX_LOGPROBS, SamplingParams
from infer.batch.tree import Budget
from infer.kvcache.memory import EngineSizes
from infer.steps.serving import Serving
from kernels.dispatch import uses_triton
from kernels.triton import INTERPRETED

log = logging.getLogger(__name__)

DECODES = 2  # steps after the prompt: in the second one the drafter has read what the first one accepted
LONG = 600  # tokens of a context that attention divides into more than one part
GREEDY = SamplingParams(ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=0)
LIMITS = ({}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1})
COUNTS = (0, 8, 20, MAX_LOGPROBS)  # of log-probabilities: one for each number that kernels round up to
MOVES = (1, 17)  # slots that move: likewise
SCORED = 128  # rows of logits, beyond which a vocabulary's tiles fill every device


class Work(NamedTuple):
    """Requests that run together until their prompts are read, and for some steps more."""

    name: str
    lengths: Sequence[int]  # of the prompts
    params: SamplingParams
    decodes: int = DECODES


def compiles(device: torch.device) -> bool:
    """Return whether kernels on this device are compiled when they are first launched."""
    return device.type == "cuda" and uses_triton(device) and not INTERPRETED


class WarmUp:
    """Compiles an engine's kernels once for every proposer that becomes the default."""

    def __init__(self) -> None:
        self._done = set[tuple[str, type]]()

    def run(self, engine: Serving, limit: Budget) -> None:
        """Run while the engine is idle and without graphs; `limit`: its largest draft.

        Leaves nothing in cache and statistics. Kernels that cannot be compiled are logged, and the engine starts
        nevertheless: most requests need others.
        """
        key = engine.proposer_name, type(engine.head)
        if not compiles(engine.device) or key in self._done:
            return
        self._done.add(key)
        pool, stats = engine.steps.pool, engine.steps.stats
        began, saved = time.perf_counter(), copy.deepcopy(stats)
        works = list(works_of(engine.sizes, engine.context, engine.config.max_batch, limit))
        bar = tqdm(works, desc="compiling kernels", unit="kind", disable=None, leave=False)
        for work in bar:
            bar.set_postfix_str(work.name)
            try:
                serve(engine, work)
            except Exception:
                log.exception("kernels for %s could not be run; such requests will fail", work.name)
                engine.check_ranks()
                if engine.device.type == "cuda":
                    torch.cuda.synchronize(engine.device)  # raises if no further launch can succeed
        with torch.inference_mode():
            size = engine.target.config.hidden_size
            for rows in row_counts(min(engine.sizes.max_rows, SCORED)):  # logits have a dtype of their own
                engine.target.logits(torch.zeros(rows, size, dtype=engine.dtype, device=engine.device))
            for count in MOVES:  # how many move depends on what is accepted; the null block's slots may
                slots = torch.zeros(count, dtype=torch.int64, device=engine.device)
                pool.layers.move(slots, slots)
        pool.pages.clear_cache()
        stats.restore(saved)
        log.info(
            "compiled or loaded the kernels of %d kinds of steps in %.1f s", len(works), time.perf_counter() - began
        )


def row_counts(most: int) -> Sequence[int]:
    """Return numbers of rows with all tiles, which change at 17, 33 and 65, and where programs fill the device."""
    return 1, *(1 + (1 << power) for power in range(4, (most - 1).bit_length()))


def works_of(sizes: EngineSizes, context: int, max_batch: int, limit: Budget) -> Iterator[Work]:
    """Yield requests that between them launch every kernel of the steps that the host runs.

    `limit`: the largest draft; trees are built by other kernels for other depths.
    """
    several = limit.depth + DECODES + 2
    longest = min(context - several, sizes.cache_tokens // 2)
    # Nobody ends by itself: a drafter reads no prompt of a request that does.
    greedy, sampled = (replace(params, max_tokens=several) for params in (GREEDY, SAMPLED))
    for rows in row_counts(sizes.max_rows):
        lengths = divided(rows, min(sizes.prefill_chunk, longest))
        if len(lengths) <= max_batch:
            yield Work(f"{rows} rows of prompts", lengths, greedy, 1)  # in which a drafter reads the prompt
    yield Work("a long context", [min(LONG, longest)], greedy)
    yield Work("a full batch", [1] * max_batch, greedy)
    yield Work("penalties, greedy", [2], replace(greedy, presence_penalty=0.5))
    for limits in LIMITS:
        yield Work(" and ".join(limits) or "sampling", [2], replace(sampled, presence_penalty=0.5, **limits))
    for count in COUNTS:
        for of in ("raw", "processed"):
            yield Work(f"{count} {of} log-probabilities", [2], replace(sampled, logprobs=count, logprobs_of=of), 0)
    for rule in ("typical", "block"):
        yield Work(f"{rule} acceptance", [2], replace(sampled, acceptance=rule))
        yield Work(f"{rule} acceptance and top_k", [2], replace(sampled, acceptance=rule, top_k=5))
    for depth in range(1, 1 if limit.is_chain else limit.depth):
        yield Work(f"trees of depth {depth}", [2], replace(sampled, max_draft_tokens=depth), 1)


def divided(rows: int, most: int) -> list[int]:
    """Divide rows into lengths of at most `most` each, as equal as possible."""
    count = -(-rows // most)
    return [rows // count + (index < rows % count) for index in range(count)]


def serve(engine: Serving, work: Work) -> None:
    """Run the requests for a few steps and abort them. A request that the engine cannot hold is left out."""
    vocabulary, names, steps = engine.target.config.vocab_size, list[str](), work.decodes
    params = replace(work.params, cache_salt=work.name)  # or another kind's cached pages would take the place of rows
    if params.logprobs is not None:
        params = replace(params, logprobs=min(params.logprobs, vocabulary))
    try:
        for index, length in enumerate(work.lengths):
            prompt = [(index + place) % vocabulary for place in range(length)]  # no two begin alike
            try:
                names.append(engine.add(prompt, params))
            except ValueError as error:
                log.debug("%s: %s", work.name, error)
                continue
            steps += -(-length // engine.sizes.prefill_chunk)
        while engine.has_work and steps > 0:
            engine.step()
            steps -= 1
    finally:
        for name in names:
            engine.abort(name)
