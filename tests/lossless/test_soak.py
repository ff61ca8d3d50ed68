"""Thousands of short random requests through one engine: nothing fails, nothing leaks, nothing grows.

`pytest tests/lossless/test_soak.py --soak 10000 -s` runs the full soak test and prints its numbers.
"""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from infer.batch.history import Evidence, Rates
from infer.batch.params import SamplingParams
from infer.batch.tree import MAX_NODES, chain_fields
from infer.engine import Engine
from infer.request import Request
from infer.speculation.proposers.suffix_decoding.automaton import Edge, SuffixAutomaton
from infer.speculation.proposers.suffix_decoding.drafts import CopyRates
from infer.speculation.proposers.suffix_decoding.responses import Generation, digest
from models.layers import Linear
from tests.lossless import faults
from tests.lossless.leftovers import PREFIX, assert_nothing_left, kept, open_files
from tests.lossless.plain import Answer, Plain
from tests.lossless.random_requests import FIELDS, GRAMMARS, is_exact, random_params, random_prompt, singles
from tests.pools import check_pool

SEED = 1
MAX_PRESENT = 30  # requests in the engine at a time
ANSWER_TOKENS = 300  # size of suffix decoding's memory, small enough that it is full
MAX_GROWTH_MIB = 16  # after the first quarter of the requests; 10,000 requests grew by 3.4
# Not counted as growth: what suffix decoding remembers, whose bound is asserted separately, what drafts have taught of
# each tenant.
MEMORY = (Edge, SuffixAutomaton, Generation, CopyRates, Evidence, Rates)


class Soak:
    """Keeps several requests in the engine, each with its output so far."""

    def __init__(self, engine: Engine, rng: random.Random, now: list[float]) -> None:
        self.engine, self.rng, self.now = engine, rng, now
        self.present: dict[str, tuple[list[int], SamplingParams, Answer]] = {}
        self.ended: list[tuple[list[int], SamplingParams, Answer]] = []  # since the last check
        self.added = self.steps = self.tokens = 0
        self.reasons: Counter[str] = Counter()
        self.fields_set: set[str] = set()  # fields that some request set to another value than the default
        self.moments: dict[str, str] = {}  # by request: the moment at which its proposer fails
        faults.install(engine, lambda request: self.moments.get(request.request_id))

    def add(self) -> None:
        rng = self.rng
        prompt, params = random_prompt(rng, self.engine.context), random_params(rng)
        self.fields_set |= {f.name for f in fields(params) if getattr(params, f.name) != f.default}
        parent = None
        for single in [params] if params.n == 1 else singles(params, seed=self.added):
            name = f"{PREFIX}{self.added}"
            self.added += 1
            self.engine.add(prompt, single, request_id=name, parent=parent)
            # A request without a seed gets one from the engine.
            (seeded,) = singles(single, seed=self.engine.request(name).seed)
            self.present[name] = prompt, seeded, Answer()
            parent = parent or name
            if rng.random() < 0.03:
                self.moments[name] = rng.choice(faults.MOMENTS)

    def step(self) -> None:
        if self.present and self.rng.random() < 0.04:
            self.engine.abort(victim := self.rng.choice(list(self.present)))
            self.end(victim, "abort")
        self.now[0] += self.rng.choice([0.0, 0.001, 0.004])
        for output in self.engine.step():
            self.present[output.request_id][2].take(output)
            self.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.end(output.request_id, output.finish_reason)
        self.steps += 1

    def end(self, name: str, reason: str) -> None:
        self.reasons[reason] += 1
        self.moments.pop(name, None)
        self.ended.append(self.present.pop(name))

    def serve(self, until: int, plain) -> None:
        """Run until `until` requests have been added and have ended; compare a tenth of them with plain decoding."""
        while self.added < until or self.present:
            while self.added < until and len(self.present) < MAX_PRESENT and self.rng.random() < 0.7:
                self.add()
            self.step()
            if self.steps % 50 == 0:
                check_pool(self.engine._pool, self.engine._scheduler.running)
                assert kept(self.engine) <= set(self.present)
            for prompt, params, answer in self.ended:
                if self.rng.random() < 0.1 and is_exact(params):
                    full = plain.uncached(prompt, params)
                    assert answer.is_prefix_of(full), (prompt, params)
                    assert answer == full or answer.finish_reason not in ("stop", "length"), (prompt, params)
            self.ended.clear()


def tensors() -> Counter[str]:
    """Count live tensors by dtype and shape, which shows what a leak consists of."""
    alive = (tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor)
    return Counter(f"{tensor.dtype} {list(tensor.shape)}" for tensor in alive)


def snapshot() -> tuple[float, Counter[str]]:
    """Return the resident memory in MiB, and the number of the engine's objects and of tensors by class."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the allocator would otherwise keep freed memory
    classes = [type(thing) for thing in gc.get_objects()]
    counted = [kind for kind in classes if str(kind.__module__).startswith("infer.") or kind is torch.Tensor]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20, Counter(kind.__name__ for kind in counted if kind not in MEMORY)


@torch.inference_mode()
def warm_up_row_counts(engine: Engine) -> None:
    """Use every row count once: oneDNN caches a kernel for each, which takes up to a tenth of a MiB and is no leak."""
    modules = (engine.target, engine.head, engine._draft_model.module)
    linears = [layer.packed for module in modules for layer in module.modules() if isinstance(layer, Linear)]
    for linear in {(layer.in_features, layer.out_features): layer for layer in linears}.values():
        for rows in range(1, engine.config.max_rows + 1):
            linear(torch.zeros(rows, linear.in_features))


def warm_up_proposers(engine: Engine, plain: Plain) -> None:
    """Run every proposer for every tenant, since requests may select them late.

    What drafts teach is kept by tenant, and a model creates its rotary table at its first run.
    """
    for name in FIELDS["proposer"]:
        for salt in ("", *FIELDS["cache_salt"]):
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, proposer=name, cache_salt=salt))
    # An engine makes its grammar compiler with the first grammar.
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, grammar=GRAMMARS[0]))
    plain.uncached([1, 2, 3], SamplingParams(max_tokens=8, grammar=GRAMMARS[0]))


@pytest.mark.slow
def test_soak(make_small_engine, make_plain, request):
    count, start = request.config.getoption("--soak"), time.perf_counter()
    earlier_requests = snapshot()[1][Request.__name__]  # of earlier tests in this process, to which references remain
    now = [0.0]
    engine = make_small_engine(
        proposer="head",
        shape={"tree": "beam:3x4:12"},
        max_batch=16,
        max_tokens_in_cache=320,
        page_size=8,
        prefill_chunk=24,
        max_rows=80,
        clock=lambda: now[0],
    )
    responses = engine._proposers["suffix"]()[0]._responses
    responses._most_tokens = ANSWER_TOKENS
    plain = make_plain(small=True)
    warm_up_proposers(engine, plain)
    soak = Soak(engine, random.Random(SEED), now)
    warm_up_row_counts(engine)
    for width in range(1, MAX_NODES + 1):
        chain_fields(width, torch.device("cpu"))  # cached by width: a chain of a new width is no leak
    with faults.failed_requests() as failed:
        soak.serve(count // 4, plain)
        assert_nothing_left(engine)
        before, files, shapes = snapshot(), open_files(), tensors()
        soak.serve(count, plain)
        assert_nothing_left(engine)
        after = snapshot()
    numbers = {
        "requests": soak.added,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": soak.steps,
        "tokens": soak.tokens,
        "ended": dict(soak.reasons),
        "pre-emptions": engine.stats.preemptions,
        "proposer failures": len(failed),
        "drafted, accepted": (engine.stats.speculation.drafted, engine.stats.speculation.accepted),
        "MiB": (round(before[0], 1), round(after[0], 1)),
        "files": (files, open_files()),
        "objects": (before[1].total(), after[1].total()),
    }
    print(numbers)
    assert soak.fields_set == {f.name for f in fields(SamplingParams)}
    assert all(soak.reasons[reason] for reason in ("stop", "length", "abort", "deadline")), numbers
    assert engine.stats.preemptions > 0
    assert len(failed) > 0
    assert (after[1] - before[1], before[1] - after[1]) == (Counter(), Counter()), tensors() - shapes
    assert after[1][Request.__name__] == earlier_requests
    assert after[0] - before[0] < MAX_GROWTH_MIB, numbers
    assert open_files() == files
    assert set(responses._tenants) <= {digest(salt) for salt in ("", *FIELDS["cache_salt"])}
    remembered = sum(each.automaton.tokens for tenant in responses._tenants.values() for each in tenant)
    assert ANSWER_TOKENS / 4 < remembered <= ANSWER_TOKENS
