"""How many kernels a step launches: bounds on counts, not times, for a target of three layers and a head of one.

A layer of the target is nine launches, and the LM head with its norm two. The rest of a bound is what plans, samples
and advances.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from infer.graphs.cuda_graph import Graph
from infer.processes.target_worker import Shard
from kernels import triton as switch
from tests.lossless.conftest import make_small_engine  # noqa: F401
from tests.lossless.plain import GREEDY
from tests.operations import counted, not_run

GREEDY = replace(GREEDY, max_tokens=30)
SAMPLED = replace(GREEDY, temperature=0.8, seed=1, top_p=0.9)
PROMPTS = [[7, 8, 9], [4, 5]]
DRAFTS = {
    "plain": ("none", {}),
    "chain of 5": ("head", {"max_draft_tokens": 5}),
    "tree 4x5": ("head", {"tree": "beam:4x5:16"}),
}
# Launches of a round: greedy, with top-p. One plain step serves both, and one drafting step has all limits: the kernels
# of a search that no row asks for return at once.
CAPTURED = {"plain": (59, 59), "chain of 5": (143, 257), "tree 4x5": (180, 294)}
HOST_STEP = {"plain": (62, 77), "chain of 5": (169, 239), "tree 4x5": (219, 289)}  # of a step that the host runs

MODELS = (  # kernels of the target and the head
    "linear_kernel",
    "rms_norm_kernel",
    "norm_beside_kernel",
    "rotate_and_write_kernel",
    "attend",
    "branch",
    "combine",
    "plan_rows",
    "plan_tails",
    "embedding",
)


@pytest.fixture
def make(make_small_engine, monkeypatch):  # noqa: F811
    monkeypatch.setenv(switch.SWITCH, "triton")
    monkeypatch.setattr("infer.engine.engine.probe_exactness", lambda *parts: None)  # minutes in the interpreter

    def engine_for(kind, **options):
        proposer, shape = DRAFTS[kind]
        engine = make_small_engine(torch.float32, proposer, shape, threads=1, max_batch=2, prefill_chunk=16, **options)
        return engine

    with not_run("best_kernel"):  # without it trees would have no root
        yield engine_for


def decoding(engine, params):
    """Run the engine until all requests decode, two steps beyond."""
    requests = [engine.request(engine.add(prompt, params)) for prompt in PROMPTS]
    while any(not request.output_length for request in requests):
        engine.step()
    engine.step()
    engine.step()
    return requests


def end(engine, requests):
    for request in requests:
        engine.abort(request.request_id)
    engine.step()


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_round(make, kind):
    engine, totals = make(kind, graphs="on"), []
    for params in (GREEDY, SAMPLED):
        requests = decoding(engine, params)
        graphs = engine.steps.overlap._graphs
        with torch.inference_mode(), counted() as launches:
            graphs._graphs[graphs._key]()
        totals.append(launches.total)
        end(engine, requests)
    assert all(total <= most for total, most in zip(totals, CAPTURED[kind], strict=True)), totals


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_step_of_the_host_uploads_before_its_forward(make, kind):
    engine, totals = make(kind, graphs="off"), []
    for params in (GREEDY, SAMPLED):
        requests = decoding(engine, params)
        with counted() as launches, copies() as uploads:
            engine.step()
        totals.append(launches.total)
        assert uploads["before"] > 0
        assert uploads["after"] <= (kind == "tree 4x5")  # the accepted path, which the host finds, moves
        end(engine, requests)
    assert all(total <= most for total, most in zip(totals, HOST_STEP[kind], strict=True)), totals


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_step_of_the_host_replays_draft_and_forward(make, kind):
    """Beside a request with log-probabilities: of the models' kernels only the LM head's is outside a graph."""
    engine, run = make(kind, graphs="on"), Graph.__call__
    requests = decoding(engine, replace(SAMPLED, logprobs=0))
    with counted() as launches, patch.object(Graph, "__call__", lambda graph: without(launches, run, graph)):
        engine.step()
    assert {name: launches.names[name] for name in MODELS if launches.names[name]} == {"linear_kernel": 1}
    engine._runner.graphs = engine._head.graphs = None
    with counted() as launches:
        engine.step()
    assert sum(launches.names[name] for name in MODELS) >= 1 + 9 * engine.target.config.num_layers
    end(engine, requests)


def without(launches, run, graph):
    """Run a graph and forget what it launched."""
    names = launches.names.copy()
    out = run(graph)
    launches.names = names
    return out


@contextmanager
def copies():
    """Count copies from the host to the device, before and after the target's forward."""
    counts, moment = Counter(), "before"

    def counting(function, counts_as_copy):
        def call(*args, **kwargs):
            counts[moment] += counts_as_copy(args, kwargs)
            return function(*args, **kwargs)

        return call

    def forward(*args, original=Shard.forward, **kwargs):
        nonlocal moment
        out = original(*args, **kwargs)
        moment = "after"
        return out

    tensor = counting(torch.tensor, lambda args, kwargs: "device" in kwargs)
    to = counting(torch.Tensor.to, lambda args, kwargs: any(isinstance(x, torch.device) for x in args[1:]))
    with (
        patch.object(Shard, "forward", forward),
        patch.object(torch, "tensor", tensor),
        patch.object(torch.Tensor, "to", to),
    ):
        yield counts
