"""A failing proposer costs drafts and no token, and a failure in `propose` costs the drafts of one request only."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from infer.request import SamplingParams
from tests.lossless import faults
from tests.lossless.plain import answer_all
from tests.lossless.random_requests import random_prompt
from tests.pools import check_pool

ENGINES = {
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:3x4"}},
    "mlp chain": {"proposer": "head", "head": "mlp"},
    "p-eagle tree": {"proposer": "head", "head": "p-eagle, one layer", "shape": {"tree": "beam:3x4"}},
    "dspark chain": {"proposer": "head", "head": "dspark"},
    "draft model": {"proposer": "draft_model"},
    "draft model tree": {"proposer": "draft_model", "shape": {"tree": "beam:3x4:10"}},
    "combined": {"proposer": "combined"},
}
DOOMED = ("1", "4")
LATE = 6  # tokens after which the fault occurs


@pytest.fixture(scope="module")
def requests():
    """Requests with different cache salts, so that the drafts of each depend on no other request's output."""
    rng = random.Random(5)
    sampled = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=3)
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    params = [greedy if index % 2 else sampled for index in range(7)]
    return [(random_prompt(rng, 60), replace(base, cache_salt=str(index))) for index, base in enumerate(params)]


def run(engine, requests):
    drafted: dict[str, int] = {}
    forget = engine.speculator.forget

    def recorded_forget(request):
        drafted[request.request_id] = request.stats.drafted
        forget(request)

    engine.speculator.forget = recorded_forget
    return [answer.token_ids for answer in answer_all(engine, requests)], drafted


TRACKED = [name for name in ENGINES if name not in ("ngram", "suffix")]
# Before and after the same call each engine fails in turn.
CELLS = [
    (name, moment)
    for number, moment in enumerate(faults.MOMENTS)
    for name in (list(ENGINES) if "propose" in moment else TRACKED)[number % 2 :: 2]
]


@pytest.fixture(scope="module")
def drafted_without_failures(make_small_engine, requests):
    """Return a function that returns how much the engine of a name drafts for each request, run once a name."""
    return cache(lambda name: run(make_small_engine(max_batch=8, **ENGINES[name]), requests)[1])


@pytest.mark.parametrize(("name", "moment"), CELLS)
def test_failures_cost_no_token_and_no_other_requests_drafts(
    make_small_engine, make_plain, drafted_without_failures, requests, name, moment
):
    plain, unharmed = make_plain(small=True), drafted_without_failures(name)
    engine = make_small_engine(max_batch=8, **ENGINES[name])
    faults.install(
        engine, lambda r: moment if r.request_id in DOOMED and len(r.tokens) >= len(r.prompt_ids) + LATE else None
    )
    with faults.failed_requests() as failed:
        answers, drafted = run(engine, requests)
    assert answers == [plain(*request).token_ids for request in requests]
    assert len(failed) == len(set(failed)), "said twice"
    assert engine.stats.proposer_failures == len(failed)
    if "propose" in moment:
        assert sorted(failed) == sorted(DOOMED)
        for request_id in drafted:
            if request_id not in DOOMED:
                assert drafted[request_id] == unharmed[request_id]
    else:  # the state of every request in that commit can no longer be trusted
        assert set(DOOMED) <= set(failed)
    drafting = [request_id for request_id in DOOMED if unharmed[request_id]]  # n-grams seldom recur in sampled tokens
    assert drafting
    assert all(drafted[request_id] < unharmed[request_id] for request_id in drafting)
    check_pool(engine._pool, [])


@pytest.mark.parametrize("name", ["head chain", "draft model"])
def test_answers_to_one_prompt_do_not_begin_with_pages_that_a_failed_proposer_left_empty(make_small_engine, name):
    """Drafting fails at once for the request that computes the prompt; others accept as many drafts as without."""
    prompt, params = list(range(3, 33)), SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.5)
    accepted = []
    for doomed in ("first", "nobody"):
        engine = make_small_engine(page_size=4, max_batch=8, **ENGINES[name])
        faults.install(engine, lambda r, doomed=doomed: "before commit" if r.request_id == doomed else None)
        requests = []
        with faults.failed_requests() as failed:
            for index, request_id in enumerate(("first", "second", "third")):
                parent = "first" if index else None
                engine.add(prompt, replace(params, seed=index), request_id=request_id, parent=parent)
                requests.append(engine._requests[request_id])
            while engine.has_work:
                engine.step()
        assert failed == ([doomed] if doomed == "first" else [])
        accepted.append([request.stats.accepted for request in requests[1:]])
    assert accepted[0] == accepted[1]
    assert min(accepted[0]) > 0
