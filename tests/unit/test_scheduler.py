"""Random requests through the scheduler and the page pool: no page leaks, no request starves, order is kept."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.tree import Budget
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import KVLayers
from infer.request import Phase, Request, SamplingParams
from infer.steps.scheduler import Scheduler
from kernels.attention import LayerShape
from tests.pools import check_pool

CONTEXT = 64


def make(num_pages, max_batch, max_rows, chunk):
    layers = KVLayers(
        [LayerShape(1, 1)],
        tree_layers=1,
        num_pages=num_pages,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool = KVPool(layers, max_requests=max_batch, max_positions=CONTEXT)
    scheduler = Scheduler(pool, max_batch=max_batch, max_rows=max_rows, prefill_chunk=chunk)
    return pool, scheduler


def schedule(scheduler, drafts):
    """Schedule a step in which every request may draft chains of up to `drafts` tokens."""
    limits = [max(0, min(drafts, request.remaining - 1)) for request in scheduler.decoding]
    budgets = [Budget(limit, limit) for limit in limits]
    return scheduler.schedule(scheduler.decoding, budgets, scheduler.admissible())


def take_step(pool, scheduler, max_batch, max_rows, drafts, generator):
    """Run a step with random acceptance, assert what must hold of every step, and return the requests that ended."""
    first = scheduler.running[:1]
    decoding = [request for request in scheduler.running if request.phase is Phase.DECODE]
    preemptions = scheduler.preemptions
    step = schedule(scheduler, drafts)
    assert len(step.preempted) == scheduler.preemptions - preemptions
    assert all(request in scheduler.waiting or request in step.admitted for request in step.preempted)
    assert scheduler.running[: len(first)] == first, "the first in order had to go for another"
    check_pool(pool, scheduler.running)
    assert sum(1 + b.nodes for b in step.budgets) + sum(step.chunks) <= max_rows
    assert len(scheduler.running) <= max_batch
    assert step.decodes or step.prefills or not scheduler.running, "a step must bring something forward"
    # a decoding request is served, or pre-empted and perhaps admitted again in the same step
    served = [*step.decodes, *step.prefills, *scheduler.waiting]
    assert all(request in served for request in decoding), "one was left out"
    for request, budget in zip(step.decodes, step.budgets, strict=True):
        assert request.computed == len(request.tokens) - 1
        assert len(request.pages) * 4 >= len(request.tokens) + budget.nodes
        accepted = int(torch.randint(0, budget.nodes + 1, (), generator=generator))
        request.computed += 1 + accepted
        request.tokens += [2] * min(1 + accepted, request.remaining)
    for request, count in zip(step.prefills, step.chunks, strict=True):
        assert len(request.pages) * 4 >= request.computed + count
        request.computed += count
        if request.computed == len(request.tokens):
            request.phase = Phase.DECODE
            request.tokens.append(2)
    ended = [request for request in [*step.decodes, *step.prefills] if request.remaining <= 0]
    for request in ended:
        scheduler.remove(request)
    return ended


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12),
    num_pages=st.integers(16, 40),
    max_batch=st.integers(1, 5),
    chunk=st.integers(1, 9),
    extra_rows=st.integers(0, 20),
    drafts=st.integers(0, 6),
    aborts=st.sets(st.integers(0, 11), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_every_request_ends_and_every_page_returns(
    sizes, num_pages, max_batch, chunk, extra_rows, drafts, aborts, seed
):
    max_rows = max(chunk, max_batch) + extra_rows
    pool, scheduler = make(num_pages, max_batch, max_rows, chunk)
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for index, (prompt, length) in enumerate(sizes):
        request = Request(str(index), [1] * prompt, SamplingParams(max_tokens=length), 0, [1] * prompt)
        requests.append(request)
        scheduler.add(request)
    finished: list[str] = []
    for turn in range(3000):
        if not scheduler.running and not scheduler.waiting:
            break
        if turn == 5:
            for index in aborts & set(range(len(requests))):
                if requests[index].phase is not Phase.FINISHED:
                    scheduler.remove(requests[index])
        finished += [
            request.request_id for request in take_step(pool, scheduler, max_batch, max_rows, drafts, generator)
        ]
    assert not scheduler.running
    assert not scheduler.waiting
    check_pool(pool, [])
    assert pool.free_pages == num_pages

    assert set(finished) >= {str(i) for i in range(len(sizes))} - {str(i) for i in aborts}


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=8),
    present=st.integers(1, 9),
    num_pages=st.integers(16, 40),
    max_batch=st.integers(1, 5),
    chunk=st.integers(1, 9),
    extra_rows=st.integers(0, 20),
    drafts=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_nobody_waits_longer_than_those_before_it_take(
    sizes, present, num_pages, max_batch, chunk, extra_rows, drafts, seed
):
    """Under constant load, with `present` requests at any time and sizes in rotation, waiting time is bounded.

    The first in order gets a row or a chunk in every step and is never pre-empted for another, so it ends within the
    steps that it would take alone. A request behind `present - 1` others ends within `present` times as many steps.
    """
    max_rows = max(chunk, max_batch) + extra_rows
    pool, scheduler = make(num_pages, max_batch, max_rows, chunk)
    generator = torch.Generator().manual_seed(seed)
    endless, numbers = itertools.cycle(sizes), itertools.count()
    arrived: dict[str, int] = {}

    def arrive(turn):
        number, (prompt, length) = next(numbers), next(endless)
        params = SamplingParams(max_tokens=length)
        request = Request(str(number), [1] * prompt, params, 0, [1] * prompt, arrival=number)
        arrived[request.request_id] = turn
        scheduler.add(request)

    # A prompt and all of its output may have to be recomputed, by chunks or, if drafts take the rest, a row per step.
    longest = max(prompt + 2 * length for prompt, length in sizes)
    started: list[str] = []
    for turn in range(120):
        while len(scheduler.waiting) + len(scheduler.running) < present:
            arrive(turn)
        ended = take_step(pool, scheduler, max_batch, max_rows, drafts, generator)
        new = {request.request_id for request in (*scheduler.running, *ended)}.difference(started)
        started += sorted(new, key=int)
        for request in ended:
            assert turn - arrived.pop(request.request_id) < present * longest
        assert all(turn - since <= present * longest for since in arrived.values())
    assert started == [str(number) for number in range(len(started))], "someone was overtaken"


def test_drafts_share_the_rows_alike_and_leave_room_for_prompts():
    pool, scheduler = make(num_pages=100, max_batch=5, max_rows=20, chunk=9)
    generator = torch.Generator().manual_seed(0)

    def arrive(count, prompt):
        for number in range(count):
            scheduler.add(
                Request(
                    f"{prompt}/{number}", [1] * prompt, SamplingParams(max_tokens=24), 0, [1] * prompt, arrival=prompt
                )
            )

    arrive(4, 1)
    take_step(pool, scheduler, 5, 20, 8, generator)
    step = schedule(scheduler, 8)
    assert [budget.nodes for budget in step.budgets] == [4, 4, 4, 4]
    arrive(1, 40)
    step = schedule(scheduler, 8)
    assert [budget.nodes for budget in step.budgets] == [2, 2, 2, 2]
    assert step.chunks == [8]


def test_a_request_that_waits_for_pages_may_start_once_another_has_ended():
    """Rounds ahead go on for as long as nothing `may_admit`, so an end must show there before the next step."""
    pool, scheduler = make(num_pages=16, max_batch=2, max_rows=80, chunk=64)
    first, second = requests = [
        Request(str(number), [1] * 40, SamplingParams(max_tokens=9), 0, [1] * 40, arrival=number) for number in range(2)
    ]
    for request in requests:
        scheduler.add(request)
    take_step(pool, scheduler, 2, 80, 0, torch.Generator())
    assert scheduler.running == [first]
    assert not scheduler.may_admit
    scheduler.remove(first)
    assert scheduler.may_admit
    assert scheduler.load == 1
    assert schedule(scheduler, 0).admitted == [second]
