"""Random lives of requests against the scheduler and the page pool: nothing leaks, nobody starves, order is kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.kv_cache import KVPool, LayerShape
from infer.proposers.base import Budget
from infer.request import Phase, Request, SamplingParams
from infer.scheduler import Scheduler

CONTEXT = 64


def make(num_pages, max_batch, max_rows, chunk, drafts):
    pool = KVPool(
        [LayerShape(1, 1)],
        tree_layers=1,
        num_pages=num_pages,
        page_size=4,
        max_requests=max_batch,
        max_positions=CONTEXT,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    preempted = []
    scheduler = Scheduler(
        pool,
        max_batch=max_batch,
        max_rows=max_rows,
        prefill_chunk=chunk,
        draft_budget=lambda request: Budget(*[max(0, min(drafts, request.remaining - 1))] * 2),
        draft_places=lambda request, budget: budget.nodes,
        on_preempt=preempted.append,
        on_resume=lambda request: None,
    )
    return pool, scheduler, preempted


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
    pool, scheduler, preempted = make(num_pages, max_batch, max_rows, chunk, drafts)
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
        step = scheduler.schedule()
        pool.invariants(scheduler.running)
        assert sum(1 + b.nodes for b in step.budgets) + sum(step.chunks) <= max_rows
        assert len(scheduler.running) <= max_batch
        assert step.decodes or step.prefills or not scheduler.running, "a step must bring something forward"
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
        for request in [*step.decodes, *step.prefills]:
            if request.remaining <= 0:
                scheduler.remove(request)
                finished.append(request.request_id)
    assert not scheduler.running
    assert not scheduler.waiting
    pool.invariants([])
    assert pool.free_pages == num_pages
    assert len(preempted) == scheduler.preemptions
    assert set(finished) >= {str(i) for i in range(len(sizes))} - {str(i) for i in aborts}
