"""Random request lifecycles in the whole engine against plain decoding: requests arrive, stop, are aborted, exceed
deadlines, are pre-empted, and lose their proposer. Invariants hold after every step, and in the end nothing is left.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from infer.batch.tree import Budget
from infer.request import Phase
from tests.lossless import faults
from tests.lossless.leftovers import PREFIX, assert_nothing_left, kept, open_files
from tests.lossless.oracles import Thicket
from tests.lossless.plain import Answer
from tests.lossless.random_requests import VOCAB_SIZE, is_exact, random_params, random_prompt, singles
from tests.pools import check_pages, check_pool

DRAFTS = {
    "none": {},
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix"},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:3x4:10"}},
    "eagle tree": {"proposer": "head", "head": "eagle", "shape": {"tree": "beam:2x4"}},
    "medusa tree": {"proposer": "head", "head": "medusa", "shape": {"tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}},
    "mtp chain": {"proposer": "head", "head": "mtp"},
    "mtp tree": {"proposer": "head", "head": "mtp, three modules", "shape": {"tree": "beam:2x4"}},
    "mlp chain": {"proposer": "head", "head": "mlp"},
    "p-eagle chain": {"proposer": "head", "head": "p-eagle, one layer"},
    "dflash chain": {"proposer": "head", "head": "dflash"},
    "dspark tree": {"proposer": "head", "head": "dspark", "shape": {"tree": "beam:3x4:10"}},
    "draft model": {"proposer": "draft_model"},
    "draft model tree": {"proposer": "draft_model", "shape": {"tree": "beam:3x4:10"}},
    "combined": {"proposer": "combined"},
    "thicket": {},
}
DISTURBANCES = ("abort", "abort", *faults.MOMENTS, "time", "take pages", "give pages back")
NUMBERS = st.integers(0, 2**16)  # seeds of what is drawn: uniformly, unlike hypothesis' draws
MAX_ALIVE = 10  # requests at a time; more would only wait longer
NUM_DISTINCT = 150  # requests; so few that most plain outputs are cached


class Lives(RuleBasedStateMachine):
    """`seen` counts the events of all runs."""

    drafts: ClassVar[dict[str, dict[str, Any]]] = DRAFTS
    config: ClassVar[dict[str, Any]] = {}
    random_params = staticmethod(random_params)

    def __init__(self, make_engine, make_plain, seen: Counter) -> None:
        super().__init__()
        self.make_engine, self.make_plain, self.seen = make_engine, make_plain, seen
        self.files, self.stack = open_files(), ExitStack()

    @initialize(number=NUMBERS)
    def start(self, number):
        rng = random.Random(number)
        chunk, max_batch = rng.choice([5, 40]), rng.choice([1, 3, 5, 8])
        drafts, dtype = rng.choice(sorted(self.drafts)), rng.choice([torch.float32, torch.bfloat16])
        self.now = 0.0
        self.max_rows = max(chunk, max_batch) + rng.choice([0, 3, 60])
        self.engine = self.make_engine(
            dtype,
            page_size=rng.choice([1, 4, 16]),
            max_tokens_in_cache=rng.choice([96, 128, 300]),
            max_batch=max_batch,
            prefill_chunk=chunk,
            max_rows=self.max_rows,
            prefix_cache=rng.random() < 0.7,
            clock=lambda: self.now,
            **self.drafts[drafts],
            **self.config,
        )
        self.plain = self.make_plain(dtype, small=True)
        self.expected: dict[str, Answer] = {}  # by plain decoding
        self.exact: dict[str, bool] = {}
        self.answers: dict[str, Answer] = {}  # so far
        self.alive: set[str] = set()
        self.deadlines: dict[str, float] = {}
        self.records: list[weakref.ref] = []
        self.hogged: list[int] = []
        self.doomed: dict[str, str] = {}
        if drafts == "thicket":
            thicket = Thicket(
                lambda request: self.expected[request.request_id].token_ids, seed=0, vocab_size=VOCAB_SIZE
            )
            self.engine.add_proposer(thicket, Budget(12, 5))
        faults.install(self.engine, lambda request: self.doomed.get(request.request_id))
        self.failed = self.stack.enter_context(faults.failed_requests())
        self.listen()

    def listen(self) -> None:
        """Count the rows of each step, and how often requests begin with pages of others."""
        self.rows = 0
        steps, runner, pool = self.engine.steps, self.engine._runner, self.engine._pool
        verify, prefill, adopt, fork = steps.verify_drafts, runner.prefill, pool.adopt, pool.fork

        def counted_verify(requests, tree):
            self.rows += int(tree.length.sum())
            return verify(requests, tree)

        def counted_prefill(requests, chunks, *rest):
            self.rows += sum(chunks)
            return prefill(requests, chunks, *rest)

        def counted_adopt(request, pages):
            self.seen["adopted pages"] += len(pages)
            adopt(request, pages)

        def counted_fork(parent, child):
            self.seen["forked"] += 1
            fork(parent, child)

        steps.verify_drafts, runner.prefill, pool.adopt, pool.fork = (
            counted_verify,
            counted_prefill,
            counted_adopt,
            counted_fork,
        )

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def add(self, numbers):
        for number in numbers:
            if len(self.alive) < MAX_ALIVE:
                self.add_requests(number % NUM_DISTINCT)
        self.step(1)

    def add_requests(self, number: int) -> None:
        rng = random.Random(number)
        prompt, request_params = random_prompt(rng, self.engine.context), self.random_params(rng)
        if number % 5 == 0:
            request_params = replace(request_params, deadline_s=0.01)
        names = []
        for params in singles(request_params, seed=number):
            name = f"{PREFIX}{len(self.expected)}"
            # Computed before the request is added, since a proposer may need it.
            self.expected[name], self.exact[name] = self.plain(prompt, params), is_exact(params)
            self.engine.add(prompt, params, request_id=name, parent=names[0] if names else None)
            self.records.append(weakref.ref(self.engine.request(name)))
            if params.deadline_s is not None:
                self.deadlines[name] = self.now + params.deadline_s
            self.answers[name] = Answer()
            self.alive.add(name)
            names.append(name)

    @rule(count=st.integers(1, 3))
    def step(self, count):
        for _ in range(count):
            self.rows = 0
            for output in self.engine.step():
                self.take(output)
            assert self.rows <= self.max_rows
            assert not any(self.deadlines.get(name, self.now) < self.now for name in self.alive), "too late"
            self.adds_up()

    @rule(number=NUMBERS)
    def disturb(self, number):
        """One rule for all disturbances, which also adds a request: hypothesis leaves rules out of runs at random."""
        self.add([number])
        rng, pages = random.Random(number), self.engine._pool.pages
        disturbance = rng.choice(DISTURBANCES)
        if disturbance == "time":
            self.now += rng.choice([0.02, 1.0])
        elif disturbance == "take pages":
            self.hogged += pages.take(min(rng.randrange(40), pages.free))
        elif disturbance == "give pages back":
            pages.drop(self.hogged)
            self.hogged = []
        elif self.alive:
            running, waiting = self.engine._scheduler.running, self.engine._scheduler.waiting
            name = rng.choice(running if running and rng.random() < 0.8 else [*running, *waiting]).request_id
            if disturbance == "abort":
                self.engine.abort(name)
                self.engine.abort(name)  # no error: the request may just have ended
                self.alive.discard(name)
                self.seen["abort"] += 1
            else:
                self.doomed.setdefault(name, disturbance)

    def take(self, output):
        name = output.request_id
        assert name in self.alive, "an output after the end"
        answer, expected = self.answers[name], self.expected[name]
        answer.take(output)
        assert len(output.accepted) == len(output.token_ids)
        if self.exact[name]:
            assert answer.is_prefix_of(expected)
            if output.finish_reason in ("stop", "length"):
                assert answer == expected
        if output.finish_reason == "deadline":
            assert self.deadlines[name] < self.now
        if output.finish_reason is not None:
            self.seen[output.finish_reason] += 1
            self.alive.discard(name)

    @invariant()
    def adds_up(self):
        engine, scheduler, pool = self.engine, self.engine._scheduler, self.engine._pool
        running, waiting = scheduler.running, scheduler.waiting
        held = (*(request.pages for request in running), self.hogged)
        check_pages(pool.pages, [page for pages in held for page in pages])
        if not self.hogged:
            check_pool(pool, running)
        assert sorted([*scheduler._free_rows, *(request.table_row for request in running)]) == list(
            range(engine.config.max_batch)
        )
        assert Counter(request.request_id for request in (*running, *waiting)) == Counter(self.alive)
        assert set(engine._requests) == self.alive
        for request in running:
            assert request.published <= request.computed <= len(request.pages) * engine.config.page_size
            assert request.computed == len(request.tokens) - 1 or request.phase is Phase.PREFILL
        assert not any(request.pages for request in waiting)
        assert kept(engine) <= self.alive
        assert len(self.failed) == len(set(self.failed)), "a failure is said once"
        if not any("commit" in moment for moment in self.doomed.values()):
            assert set(self.failed) <= set(self.doomed), "someone else's drafts were lost"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        with self.stack:
            self.end()
        assert open_files() == self.files

    def end(self):
        engine = self.engine
        engine._pool.pages.drop(self.hogged)
        self.hogged = []
        # The first request in scheduling order advances in every step, by its context at most in all.
        for _ in range(len(self.alive) * engine.context):
            if not engine.has_work:
                break
            self.step(1)
        self.seen["known pages"] += len(engine._pool.pages._key_of)
        assert_nothing_left(engine)
        assert not any(record() for record in self.records), "a request outlives its end"
        self.seen["pre-empted"] += engine.stats.preemptions
        self.seen["failed"] += len(self.failed)
        self.seen["accepted"] += engine.stats.speculation.accepted


def live(machine: Any, runs: int) -> None:
    """Run the same lives whatever ran before: Hypothesis draws also constants of all modules imported so far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", providers.Constants, raising=False)
        patch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024), raising=False)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=runs,
                stateful_step_count=50,
                derandomize=True,  # otherwise so few runs might lack some of the required events
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.slow
def test_lives(make_small_engine, make_plain, request):
    seen: Counter = Counter()
    live(partial(Lives, make_small_engine, make_plain, seen), request.config.getoption("--soak") // 24)
    happened = (
        "stop",
        "length",
        "deadline",
        "abort",
        "pre-empted",
        "failed",
        "accepted",
        "adopted pages",
        "forked",
        "known pages",
    )
    assert all(seen[event] > 0 for event in happened), seen
