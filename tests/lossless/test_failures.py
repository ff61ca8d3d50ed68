"""A proposer that fails, at whatever point of its work, costs drafts and no token; and drafts of one request only."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from infer.request import SamplingParams
from tests.lossless import faults
from tests.lossless.plain import answer_all
from tests.lossless.random_requests import random_prompt

ENGINES = {
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree_width": 3}},
    "mlp chain": {"proposer": "head", "head": "mlp"},
    "p-eagle tree": {"proposer": "head", "head": "p-eagle, one layer", "shape": {"tree_width": 3}},
    "draft model": {"proposer": "draft_model"},
    "combined": {"proposer": "combined"},
}
DOOMED = ("1", "4")
LATE = 6  # tokens after which it comes about


@pytest.fixture(scope="module")
def requests():
    """Each under a salt of its own: what others say is nothing to them, so their drafts are theirs alone."""
    chance = random.Random(5)
    sampled = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=3)
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    asked = [greedy if index % 2 else sampled for index in range(7)]
    return [(random_prompt(chance, 60), replace(own, cache_salt=str(index))) for index, own in enumerate(asked)]


def run(engine, requests):
    drafted: dict[str, int] = {}
    forget = engine.speculator.forget

    def noting(request):
        drafted[request.request_id] = request.stats.drafted
        forget(request)

    engine.speculator.forget = noting
    return [answer.token_ids for answer in answer_all(engine, requests)], drafted


@pytest.mark.parametrize("moment", faults.MOMENTS)
@pytest.mark.parametrize("name", ENGINES)
def test_failures_cost_no_token_and_no_other_requests_drafts(make_small_engine, make_plain, requests, name, moment):
    plain = make_plain(small=True)
    _, unharmed = run(make_small_engine(max_batch=8, **ENGINES[name]), requests)
    engine = make_small_engine(max_batch=8, **ENGINES[name])
    faults.install(
        engine, lambda r: moment if r.request_id in DOOMED and len(r.tokens) >= len(r.prompt_ids) + LATE else None
    )
    with faults.said() as told:
        answers, drafted = run(engine, requests)
    assert answers == [plain(*request).token_ids for request in requests]
    assert len(told) == len(set(told)), "said twice"
    assert engine.stats.proposer_failures == len(told)
    if "propose" in moment:
        assert sorted(told) == sorted(DOOMED)
        for own in drafted:
            if own not in DOOMED:
                assert drafted[own] == unharmed[own]
    else:  # what was kept of anyone it was told of cannot be trusted
        assert set(DOOMED) <= set(told)
    assert all(drafted[own] < unharmed[own] for own in DOOMED)
    engine._pool.invariants([])


@pytest.mark.parametrize("name", ["head chain", "draft model"])
def test_answers_to_one_prompt_do_not_begin_with_pages_that_a_failed_proposer_left_empty(make_small_engine, name):
    """The one that computes the prompt stops drafting at once; the others must draft as well as without it."""
    prompt, params = list(range(3, 33)), SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.5)
    accepted = []
    for doomed in ("first", "nobody"):
        engine = make_small_engine(page_size=4, max_batch=8, **ENGINES[name])
        faults.install(engine, lambda r, doomed=doomed: "before commit" if r.request_id == doomed else None)
        requests = []
        with faults.said() as told:
            for index, own in enumerate(("first", "second", "third")):
                parent = "first" if index else None
                engine.add(prompt, replace(params, seed=index), request_id=own, parent=parent)
                requests.append(engine._requests[own])
            while engine.has_work:
                engine.step()
        assert told == ([doomed] if doomed == "first" else [])
        accepted.append([request.stats.accepted for request in requests[1:]])
    assert accepted[0] == accepted[1]
    assert min(accepted[0]) > 0
