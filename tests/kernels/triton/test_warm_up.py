"""What the start of an engine compiles is all that serving launches, in the interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from infer.graphs import warm_up
from infer.request import SamplingParams
from kernels import triton as switch
from tests.kernels.triton.variants import seen
from tests.lossless.conftest import make_small_engine  # noqa: F401
from tests.pools import check_pool

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8)
ON_THE_HOST = {"last_accepted"}  # beside a GPU a step that the host runs has its tree in the host's memory
REQUESTS = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, top_k=7),
    replace(SAMPLED, top_p=0.8),
    replace(SAMPLED, min_p=0.2),
    replace(SAMPLED, top_k=9, top_p=0.7, min_p=0.1),
    replace(GREEDY, presence_penalty=0.3),
    replace(SAMPLED, repetition_penalty=1.3),
    replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, top_k=3, min_tokens=2, stop_token_ids=(4,)),
    replace(GREEDY, logit_bias={5: 2.0}),
    replace(SAMPLED, logit_bias={5: 2.0}, top_p=0.9, allowed_token_ids=(5, 6, 7)),
    replace(GREEDY, bad_words=((5, 6), (7,))),
    *(replace(GREEDY, logprobs=count) for count in (0, 1, 3, 5, 20)),
    replace(SAMPLED, logprobs=2, logprobs_of="processed", top_k=5),
    replace(SAMPLED, logprobs=9, logprobs_of="processed", presence_penalty=0.2),
    replace(GREEDY, prompt_logprobs=4),
    replace(SAMPLED, acceptance="typical"),
    replace(SAMPLED, acceptance="block", top_k=20),
]


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "triton")
    monkeypatch.setattr("infer.engine.engine.probe_exactness", lambda *parts: None)  # minutes in the interpreter
    monkeypatch.setattr(warm_up, "compiles", lambda device: True)


DRAFTS = {
    "nothing": ("none", None),
    "chains": ("head", None),
    "trees": ("head", {"tree": "beam:3x4:9"}),
    "n-grams": ("ngram", None),
}


@pytest.mark.parametrize(
    ("drafts", "dtype"), [("nothing", torch.float32), *((drafts, torch.bfloat16) for drafts in DRAFTS)]
)
def test_serving_compiles_nothing(compiling, make_small_engine, drafts, dtype):  # noqa: F811
    proposer, shape = DRAFTS[drafts]
    with seen("best_kernel") as compiled:  # without it trees would have no root
        engine = make_small_engine(dtype, proposer, shape, threads=1, max_batch=4, prefill_chunk=48, max_rows=80)
    rng = random.Random(0)
    with seen("best_kernel") as launched:
        for params, count in ((REQUESTS, 1), (rng.sample(REQUESTS, 12), 3)):
            prompts = [[rng.randrange(1, 90) for _ in range(rng.choice((1, 2, 16, 17, 40, 70)))] for _ in params]
            engine.generate(prompts, params, max_concurrency=count)
    assert {kernel[0] for kernel in launched} >= {"shape_kernel", "count_digits", "count_above", "linear_kernel"}
    missed = sorted(" ".join(kernel) for kernel in launched - compiled if kernel[0] not in ON_THE_HOST)
    assert not missed, "\n".join(missed)


def test_the_start_leaves_no_trace(compiling, make_small_engine, caplog):  # noqa: F811
    """In pages, prefix cache and statistics; and each proposer is prepared once."""
    caplog.set_level("INFO", "infer.graphs.warm_up")
    with seen() as compiled:
        engine = make_small_engine(torch.float32, "head", threads=1, max_batch=2, prefill_chunk=16, max_rows=32)
        assert len(compiled) > 20
        compiled.clear()
        engine.set_proposer("none")
        assert len(compiled) > 20
        compiled.clear()
        engine.set_proposer("head")
        assert not compiled
    assert [record.getMessage()[:32] for record in caplog.records] == ["compiled or loaded the kernels o"] * 2
    stats, pool = engine.stats, engine._pool
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens, stats.speculation.emitted) == (0,) * 4
    assert (stats.running, stats.waiting, stats.preemptions, stats.proposer_failures) == (0,) * 4
    assert pool.free_pages == pool.num_pages
    assert not pool.pages._key_of
    check_pool(pool, [])


def test_kernels_that_cannot_be_run_are_logged_by_name(compiling, make_small_engine, monkeypatch, caplog):  # noqa: F811
    serve = warm_up.serve

    def serve_or_fail(engine, work):
        if work.name == "top_k":
            raise RuntimeError("out of registers")
        serve(engine, work)

    monkeypatch.setattr(warm_up, "serve", serve_or_fail)
    with seen():
        engine = make_small_engine(torch.float32, threads=1, max_batch=2, prefill_chunk=16, max_rows=32)
        (completion,) = engine.generate([[1, 2, 3]], GREEDY)
    assert len(completion.token_ids) == 6
    (failure,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert failure == "kernels for top_k could not be run; such requests will fail"


def test_a_cpu_runs_no_request_at_start(make_small_engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(warm_up, "serve", lambda *parts: pytest.fail("it compiles nothing"))
    make_small_engine(torch.float32, "head", threads=1, max_batch=2)
    assert warm_up.compiles(torch.device("cuda")) == (not switch.INTERPRETED)
    monkeypatch.setattr(warm_up, "INTERPRETED", False)
    assert warm_up.compiles(torch.device("cuda", 1))
    monkeypatch.setenv(switch.SWITCH, "torch")
    assert not warm_up.compiles(torch.device("cuda", 1))


@pytest.mark.parametrize(("rows", "most", "lengths"), [(1, 16, [1]), (17, 16, [9, 8]), (2049, 2048, [1025, 1024])])
def test_rows_are_divided_among_prompts(rows, most, lengths):
    assert warm_up.divided(rows, most) == lengths
