"""Early exit of chains: probabilities learnt from simulated drafters of known accuracy, and the effect of prices."""

from __future__ import annotations

import math
import random

import pytest
import torch

from infer.request import Request, SamplingParams
from infer.speculation.budget import Budget
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.confidence import Confidence, ExitDecision, Prices
from infer.speculation.control.planner import Controller
from infer.speculation.early_exit import TensorExit, exit_terms
from kernels.early_exit import Drafting
from kernels.triton import SWITCH
from tests.drafts import chain, chains, make_costs, with_rates

DEPTH = 4


def make_request(name: str = "0", **params) -> Request:
    return Request(name, [1], SamplingParams(**params), 0, [1], frozenset())


def draft(confidence: Confidence, request: Request, log_probabilities: list[float]) -> list[ExitDecision]:
    confidence.start([request], [len(log_probabilities)])
    return [confidence.score([request], [value])[0] for value in log_probabilities]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chances_learn_what_a_drafters_confidence_is_worth(temperature):
    """The drafter states a probability of 0.9 or 0.3 and is right in 0.95 or 0.2 of these cases."""
    confidence, rng, request = Confidence(AcceptanceModel()), random.Random(0), make_request(temperature=temperature)
    truth = {0.9: 0.95, 0.3: 0.2}
    predicted = emitted = 0.0
    for step in range(3000):
        stated = [rng.choice([0.9, 0.3]) for _ in range(DEPTH)]
        draft(confidence, request, [math.log(value) for value in stated])
        right = next((place for place in range(DEPTH) if rng.random() > truth[stated[place]]), DEPTH)
        expected = confidence.update("0", DEPTH, right)
        assert expected is not None
        confidence._acceptance.record("0", "head", chain(DEPTH, right), expected)
        if step >= 1000:
            predicted, emitted = predicted + expected, emitted + right
    assert predicted == pytest.approx(emitted, rel=0.05)
    for stated, right in truth.items():
        draft(confidence, request, [math.log(stated)])
        assert confidence._drafts["0"].chances == pytest.approx([right], abs=0.1)
    assert confidence.errors is not None
    learnt_error, plain_error = confidence.errors
    assert learnt_error < 0.85 * plain_error
    other = make_request(temperature=1.0 - temperature)
    draft(confidence, other, [math.log(0.3)])
    assert confidence._drafts["0"].chances[0] > 0.3  # its kind, greedy or sampled, has no evidence yet


def test_a_token_is_kept_and_followed_if_it_is_worth_it():
    confidence, request = Confidence(with_rates([0.8])), make_request()
    sure, unsure = math.log(0.99), math.log(0.01)
    assert draft(confidence, request, [unsure] * 3) == [(True, True), (True, True), (True, False)]  # without prices
    confidence.prices = Prices(row=0.3, step=0.0, level=0.0)
    assert draft(confidence, request, [sure, sure, sure]) == [(True, True), (True, True), (True, False)]
    assert draft(confidence, request, [unsure])[0] == (True, False)  # the first is always kept
    assert draft(confidence, request, [sure, unsure])[1] == (False, False)
    assert confidence.update("0", 1, 1) == pytest.approx(confidence._maps[False].chance((0, 0, 1)), abs=0.5)
    confidence.prices = Prices(row=0.1, step=0.85, level=0.0)
    assert draft(confidence, request, [sure, sure])[0] == (True, False)


def test_a_level_is_drafted_if_it_is_worth_it_to_all_together():
    names = [str(index) for index in range(4)]
    confidence, batch = Confidence(with_rates([0.8] * 4)), [make_request(name) for name in names]
    confidence.prices = Prices(row=0.1, step=0.1, level=1.0)
    confidence.start(batch, [DEPTH] * 4)
    assert [verdict.continue_ for verdict in confidence.score(batch, [-0.01] * 4)] == [True] * 4
    confidence.start(batch, [DEPTH] * 4)
    assert [verdict.continue_ for verdict in confidence.score(batch[:1], [-0.01])] == [False]


def test_what_must_not_be_judged_is_left_alone():
    confidence = Confidence(AcceptanceModel())
    confidence.prices = Prices(row=2.0, step=2.0, level=2.0)
    block, other = make_request("0", temperature=1.0, acceptance="block"), make_request("1", proposer="combined")
    for request in (block, other):
        assert draft(confidence, request, [-9.0, -9.0]) == [(True, True)] * 2
        assert confidence.update(request.request_id, 2, 0) is None


def test_the_controller_opens_chains_at_the_prices_of_its_plan():
    acceptance = with_rates([0.9, 0.1])
    confidence = Confidence(acceptance)
    controller = Controller(make_costs(row=0.5, draft=0.3), acceptance, confidence)
    candidates = [*chains(2, DEPTH), Candidate("2", "ngram", Budget(4, 4))]
    controller.plan(("0", "1", "2"), candidates)
    controller.record_step(3, 3, 0.0, controller.costs.plain(3))  # the first step shows what a plain one costs
    controller.plan(("0", "1", "2"), candidates)
    assert controller.budget("0", Budget(DEPTH, DEPTH)) == Budget(DEPTH, DEPTH)
    speed, prices = controller.current.speed, confidence.prices
    assert prices is not None
    assert prices.row == pytest.approx(0.5 * speed)
    assert prices.step == pytest.approx(0.0)
    assert prices.level == pytest.approx(0.3 * speed)
    draft(confidence, make_request("0"), [-0.1] * 3)
    controller.record_draft("0", "head", False, chain(3, 3))
    assert confidence.errors is not None
    assert controller.forecast is not None
    assert controller.forecast.errors == confidence.errors
    controller.forget("0")
    assert confidence._drafts == {}


@pytest.mark.parametrize("switch", ["torch", "triton"])
@pytest.mark.parametrize("priced", [False, True])
def test_a_device_decides_as_the_host(monkeypatch, priced, switch):
    """`TensorExit` is the rule of `score` without the host: chains of several depths, one of them not scored."""
    monkeypatch.setenv(SWITCH, switch)
    rng, batch = random.Random(5), [make_request(str(index), temperature=index % 2) for index in range(6)]
    batch[2] = make_request("2", acceptance="block")
    depths, seen = [4, 3, 4, 1, 2, 4], set()
    confidence = Confidence(with_rates([0.9, 0.7, 0.8, 0.6]))
    for _ in range(60):
        confidence.prices = Prices(*(rng.random() ** 3 for _ in range(3))) if priced else None
        exits = TensorExit(exit_terms(confidence, batch, depths, DEPTH))
        confidence.start(batch, depths)
        active, limits = list(range(len(batch))), torch.tensor(depths)
        chains = Drafting.begin(limits)
        for level in range(DEPTH):
            log_probs = [-(rng.random() ** 4) * 5 for _ in batch]
            decisions = confidence.score([batch[index] for index in active], [log_probs[index] for index in active])
            before, chains = chains.length, exits(level, torch.tensor(log_probs), chains, limits)
            wanted = [depths[index] > level + 1 for index in active]
            keep, going = (chains.length - before)[active].bool().tolist(), chains.active[active].tolist()
            assert keep == [decision.keep for decision in decisions]
            assert going == [decision.continue_ and b for decision, b in zip(decisions, wanted, strict=True)]
            assert int(chains.active.sum()) == sum(going)
            seen.update(zip(keep, going, strict=True))
            active = [index for index, goes in zip(active, going, strict=True) if goes]
            if not active:
                break
    assert seen == ({(True, True), (True, False), (False, False)} if priced else {(True, True), (True, False)})


def test_what_was_decided_on_a_device_is_learnt_from():
    told, asked, request = Confidence(with_rates([0.8])), Confidence(with_rates([0.8])), make_request()
    values = [-0.1, -0.7, -0.2]
    draft(asked, request, values)
    told.prices = Prices(0.9, 0.9, 0.9)
    told.record(request, 3, values)
    assert told.prices == Prices(0.9, 0.9, 0.9)
    assert told.update("0", 3, 2) == asked.update("0", 3, 2)
    assert told._maps[False].weights == asked._maps[False].weights
