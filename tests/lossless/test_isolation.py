"""An exception in one request's work, at any stage of a step, ends that request alone; others keep their tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from infer.batch.grammar import Grammar
from infer.request import SamplingParams
from infer.sampling.isolation import INTERNAL, is_panic, panics_as_errors, together
from tests.lossless import faults
from tests.lossless.plain import Answer
from tests.lossless.random_requests import random_prompt
from tests.pools import check_pool

SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_k=50, seed=3)
GRAMMAR = Grammar("regex", "[a-z ]{40}")
BESIDE = {
    "plain": SAMPLED,
    "grammar": SamplingParams(max_tokens=10, temperature=0.9, seed=4, grammar=GRAMMAR),
    "penalties": replace(SAMPLED, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=2),
    "stop": replace(SAMPLED, stop=("never seen",), prompt_logprobs=1),
}
DOOMED = {
    "penalty counts": BESIDE["penalties"],
    "shaping": BESIDE["penalties"],
    "log-probabilities": replace(SAMPLED, logprobs=7),
    "prompt log-probabilities": replace(SAMPLED, prompt_logprobs=7),
    "block verification": replace(SAMPLED, acceptance="block"),
    "typical acceptance": replace(SAMPLED, acceptance="typical"),
    "stop text": BESIDE["stop"],
    "choice parameters": replace(SAMPLED, top_k=5),
}
IMMEDIATE = {"prompt log-probabilities"}
LATE = 4  # tokens after which the fault occurs


@pytest.fixture(scope="module")
def engine(make_small_engine):
    return make_small_engine(max_batch=8, proposer="head", shape={"tree": "beam:3x4"})


@pytest.fixture(scope="module")
def chains(make_small_engine):
    return make_small_engine(max_batch=8, proposer="head")


def run(engine, requests, on_add=None):
    """Return the outputs of the requests and their last step outputs, by name."""
    answers, ends = {name: Answer() for name in requests}, {}
    for name, (prompt, params) in requests.items():
        engine.add(prompt, params, request_id=name)
    if on_add is not None:
        on_add()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].take(output)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    return answers, ends


@pytest.mark.parametrize("stage", faults.STAGES)
def test_a_failure_at_any_stage_is_one_request_s(engine, chains, make_plain, monkeypatch, caplog, stage):
    engine = chains if stage == "block verification" else engine
    rng = random.Random(stage)
    params = DOOMED.get(stage, BESIDE["grammar"])
    requests = {name: (random_prompt(rng, 60), replace(base, cache_salt=name)) for name, base in BESIDE.items()}
    requests["doomed"] = (random_prompt(rng, 60), replace(params, cache_salt="doomed"))
    late = 0 if stage in IMMEDIATE else LATE
    plain = {name: make_plain(small=True)(*request) for name, request in requests.items()}
    answers, ends = run(
        engine,
        requests,
        lambda: faults.install_at(stage, engine._requests["doomed"], monkeypatch, late=late),
    )
    monkeypatch.undo()
    assert (ends["doomed"].finish_reason, ends["doomed"].internal, ends["doomed"].error) == ("error", True, INTERNAL)
    assert len(answers["doomed"].token_ids) < len(plain["doomed"].token_ids)
    if params.acceptance in (None, "exact"):
        assert answers["doomed"].token_ids == plain["doomed"].token_ids[: len(answers["doomed"].token_ids)]
    assert {name: answers[name] for name in BESIDE} == {name: plain[name] for name in BESIDE}
    assert "doomed: exception while processing this request; it ends with an error" in caplog.text
    nothing_is_held(engine)


def nothing_is_held(engine):
    check_pool(engine._pool, [])
    assert sorted(engine._scheduler._free_rows) == list(range(8))


def test_a_panic_in_rust_is_one_request_s_too(engine, make_plain, monkeypatch):
    rng = random.Random(1)
    requests = {name: (random_prompt(rng, 60), replace(base, cache_salt=name)) for name, base in BESIDE.items()}
    panic = faults.PanicException
    answers, ends = run(
        engine,
        requests,
        lambda: faults.install_at("stop text", engine._requests["stop"], monkeypatch, late=LATE, error=panic),
    )
    assert (ends["stop"].finish_reason, ends["stop"].internal) == ("error", True)
    others = [name for name in BESIDE if name != "stop"]
    assert [answers[name] for name in others] == [make_plain(small=True)(*requests[name]) for name in others]
    nothing_is_held(engine)


def test_ctrl_c_passes_through(engine, monkeypatch):
    def stop():
        faults.install_at("stop text", engine._requests["stop"], monkeypatch, late=LATE, error=KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        run(engine, {"stop": ([1, 2, 3], BESIDE["stop"])}, stop)
    engine.abort("stop")
    nothing_is_held(engine)


def test_a_fault_that_no_single_request_causes_is_raised(engine):
    def broken(requests):
        raise MemoryError

    with pytest.raises(MemoryError):
        together([], broken)


def test_what_counts_as_a_panic():
    assert is_panic(faults.PanicException("x"))
    assert not is_panic(ValueError("x"))
    with pytest.raises(RuntimeError, match="panicked"), panics_as_errors():
        raise faults.PanicException("x")
    with pytest.raises(KeyError), panics_as_errors():
        raise KeyError("x")
