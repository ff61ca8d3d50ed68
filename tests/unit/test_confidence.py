"""Early exit of chains: probabilities learnt from simulated drafters of known accuracy, and the effect of prices."""

from __future__ import annotations

import math
import random

import pytest
import torch

from infer.batch.history import History
from infer.batch.tree import Budget
from infer.request import Drafter, Request, SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.confidence import Confidence, Prices
from infer.speculation.control.planner import PLAN_STEPS, Controller
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit, exit_rows
from kernels.triton import SWITCH
from tests.drafts import chain, chains, make_costs, with_rates

DEPTH = 4


def make_request(history: History | None = None, **params) -> Request:
    return Request("0", [1], SamplingParams(**params), 0, [1], drafter=Drafter(history=history or History()))


def decide(confidence: Confidence, requests: list[Request], log_probs: list[list[float]]) -> list[list[tuple]]:
    """Return, by level and request, whether the token is kept and whether the chain goes on, of chains all as deep."""
    depth, everyone = len(log_probs), torch.ones(len(requests), dtype=torch.bool)
    terms = torch.tensor(exit_rows(confidence, requests, [depth] * len(requests), depth))
    exits, levels = EarlyExit(terms, torch.full((len(requests),), depth + 1)), []
    for level, values in enumerate(log_probs):
        before = exits.lengths
        exits.chains = exits.chains._replace(active=everyone)
        exits.after(level, torch.tensor(values))
        levels.append(((exits.lengths - before).bool(), exits.chains.active))
    return [list(zip(keep.tolist(), continues.tolist(), strict=True)) for keep, continues in levels]


def draft(confidence: Confidence, request: Request, log_probs: list[float]) -> list[tuple]:
    """Score a chain; return, by level, whether the token is kept and whether the chain goes on."""
    confidence.record(request, len(log_probs), log_probs)
    return [level[0] for level in decide(confidence, [request], [[value] for value in log_probs])]


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
        history = request.drafter.history
        expected = confidence.update(history, temperature > 0, DEPTH, right)
        assert expected is not None
        confidence._acceptance.record(history, "head", chain(DEPTH, right), expected)
        if step >= 1000:
            predicted, emitted = predicted + expected, emitted + right
    assert predicted == pytest.approx(emitted, rel=0.05)
    for stated, right in truth.items():
        draft(confidence, request, [math.log(stated)])
        assert expected_of(request) == pytest.approx(right, abs=0.1)
    assert confidence.errors is not None
    learnt_error, plain_error = confidence.errors
    assert learnt_error < 0.85 * plain_error
    other = make_request(temperature=1.0 - temperature)
    draft(confidence, other, [math.log(0.3)])
    assert expected_of(other) > 0.3  # its kind, greedy or sampled, has no evidence yet


def expected_of(request: Request) -> float:
    """Return how many tokens of the chain that was scored last for the request are expected to be emitted."""
    assert request.drafter.history.scores is not None
    return sum(score.emitted for score in request.drafter.history.scores)


def test_a_token_is_kept_and_followed_if_it_is_worth_it():
    acceptance, histories = with_rates([0.8])
    confidence, request = Confidence(acceptance), make_request(*histories)
    sure, unsure = math.log(0.99), math.log(0.01)
    assert draft(confidence, request, [unsure] * 3) == [(True, True)] * 3  # without prices
    confidence.prices = Prices(row=0.3, step=0.0, level=0.0)
    assert draft(confidence, request, [sure, sure, sure]) == [(True, True), (True, True), (True, False)]
    assert draft(confidence, request, [unsure])[0] == (True, False)  # the first is always kept
    assert draft(confidence, request, [sure, unsure])[1] == (False, False)
    confidence.prices = Prices(row=0.1, step=0.85, level=0.0)
    assert draft(confidence, request, [sure, sure])[0] == (True, False)


def test_a_level_is_drafted_if_it_is_worth_it_to_all_together():
    acceptance, histories = with_rates([0.8] * 4)
    confidence, batch = Confidence(acceptance), [make_request(history) for history in histories]
    confidence.prices = Prices(row=0.1, step=0.1, level=1.0)
    levels = [[-0.01] * 4, [0.0] * 4]
    assert [continues for _, continues in decide(confidence, batch, levels)[0]] == [True] * 4
    exits = EarlyExit(exit_rows(confidence, batch, [DEPTH] * 4, DEPTH), [DEPTH, 0, 0, 0])
    assert not exits.after(0, torch.full((4,), -0.01))


def test_what_must_not_be_judged_is_left_alone():
    confidence = Confidence(AcceptanceModel())
    confidence.prices = Prices(row=2.0, step=2.0, level=2.0)
    block, other = make_request(temperature=1.0, acceptance="block"), make_request(proposer="combined")
    for request in (block, other):
        assert draft(confidence, request, [-9.0, -9.0]) == [(True, True)] * 2
        assert confidence.update(request.drafter.history, request is block, 2, 0) is None
    priced = make_request()
    assert draft(confidence, priced, [-9.0, -9.0])[0] == (True, False)
    assert decide(confidence, [block, priced], [[-9.0] * 2] * 2)[1] == [(True, True), (False, False)]
    confidence.scoring = False
    assert draft(confidence, priced, [-9.0, -9.0]) == [(True, True)] * 2


def test_the_controller_opens_chains_at_the_prices_of_its_plan():
    acceptance, histories = with_rates([0.9, 0.1])
    confidence = Confidence(acceptance)
    controller = Controller(make_costs(row=0.5, draft=0.3), acceptance, confidence)
    candidates = [*chains(DEPTH, histories), Candidate("2", "ngram", Budget(4, 4))]
    names = tuple(candidate.request_id for candidate in candidates)
    for step in range(1 + PLAN_STEPS):
        if controller.next_step(names):
            controller.plan(names, candidates)
        if not step:
            controller.record_step(3, 3, 0.0, controller.costs.plain(3))  # shows what a plain step costs
    assert controller.budget("0", Budget(DEPTH, DEPTH)) == Budget(DEPTH, DEPTH)
    speed, prices = controller.current.speed, confidence.prices
    assert prices is not None
    assert prices.row == pytest.approx(0.5 * speed)
    assert prices.step == pytest.approx(0.0)
    assert prices.level == pytest.approx(0.3 * speed)
    draft(confidence, make_request(histories[0]), [-0.1] * 3)
    controller.record_draft(histories[0], "head", False, chain(3, 3))
    assert confidence.errors is not None
    assert controller.forecast is not None
    assert controller.forecast.errors == confidence.errors
    assert histories[0].scores is None


def test_a_level_that_no_chain_needs_ends_the_draft():
    """A chain that has ended does not count, whatever its values are."""
    acceptance, histories = with_rates([0.8] * 2)
    confidence, batch = Confidence(acceptance), [make_request(history) for history in histories]
    confidence.prices = Prices(row=0.3, step=0.0, level=0.3)
    depths = [DEPTH, 2]
    exits = EarlyExit(exit_rows(confidence, batch, depths, DEPTH), depths)
    log_probs = torch.tensor([math.log(0.05), -0.01])
    assert exits.after(0, log_probs)
    assert exits.chains.active == [False, True]
    assert not exits.after(1, log_probs)  # the second was to have two tokens
    assert exits.lengths.tolist() == [1, 2]


@pytest.mark.parametrize("switch", ["torch", "triton"])
@pytest.mark.parametrize("priced", [False, True])
def test_a_device_decides_as_the_host(monkeypatch, priced, switch):
    """Chains of several depths, one of them not scored."""
    monkeypatch.setenv(SWITCH, switch)
    acceptance, histories = with_rates([0.9, 0.7, 0.8, 0.6])
    histories += [History(), History()]
    rng = random.Random(5)
    batch = [make_request(history, temperature=index % 2) for index, history in enumerate(histories)]
    batch[2] = make_request(acceptance="block", temperature=1.0)
    depths, seen = [4, 3, 4, 1, 2, 4], set()
    confidence = Confidence(acceptance)
    for _ in range(60):
        confidence.prices = Prices(*(rng.random() ** 3 for _ in range(3))) if priced else None
        rows = exit_rows(confidence, batch, depths, DEPTH)
        on_device, on_host = EarlyExit(torch.tensor(rows), torch.tensor(depths)), EarlyExit(rows, depths)
        for level in range(DEPTH):
            before, active = on_host.lengths, torch.as_tensor(on_host.chains.active)
            log_probs = torch.tensor([-(rng.random() ** 4) * 5 for _ in batch])
            assert on_device.after(level, log_probs)  # it never waits to know
            goes_on = on_host.after(level, log_probs)
            assert on_device.lengths.tolist() == on_host.lengths.tolist()
            assert on_device.chains.active.tolist() == on_host.chains.active
            assert goes_on is any(on_host.chains.active)
            deeper = active & (torch.tensor(depths) > level + 1)
            kept, going = (on_host.lengths - before).bool(), torch.as_tensor(on_host.chains.active)
            seen.update(zip(kept[deeper].tolist(), going[deeper].tolist(), strict=True))
            if not goes_on:
                break
    assert seen == ({(True, True), (True, False), (False, False)} if priced else {(True, True)})


def lengths_of(
    confidence: Confidence, requests: list[Request], depths: list[int], values: list[list[float]], parallel: bool = True
) -> list[int]:
    """Return the lengths of chains all of whose tokens are drafted already, decided on the host and on the device."""
    rows, log_probs = exit_rows(confidence, requests, depths, DEPTH, parallel=parallel), torch.tensor(values)
    both = EarlyExit(rows, depths), EarlyExit(torch.tensor(rows), torch.tensor(depths))
    for exits in both:
        exits.after_all(log_probs)
    assert both[0].lengths.tolist() == both[1].lengths.tolist()
    return both[0].lengths.tolist()


def test_a_parallel_heads_chain_ends_where_the_next_row_does_not_pay():
    """All levels are drafted in any case: neither their price nor past rates end a chain that the head is sure of."""
    request, certain, doubtful = make_request(), math.log(0.95), math.log(0.2)
    confidence = Confidence(AcceptanceModel({"head": [0.9, 0.05, 0.05, 0.05]}))  # later tokens were hardly ever right
    confidence._weights[False] = 0.0, 1.0, 0.0  # the drafter's probabilities count alone
    confidence.prices = Prices(row=0.3, step=0.4, level=0.5)

    def length(values: list[float], *, parallel: bool) -> int:
        (drafted,) = lengths_of(confidence, [request], [DEPTH], [values], parallel=parallel)
        return drafted

    assert length([certain] * DEPTH, parallel=True) == DEPTH
    assert length([certain] * DEPTH, parallel=False) == 1
    assert length([certain, certain, doubtful, certain], parallel=True) == 2
    assert length([doubtful] * DEPTH, parallel=True) == 1  # the first token is always kept
    confidence.prices = Prices(row=0.0, step=0.4, level=0.5)
    assert length([doubtful] * DEPTH, parallel=True) == DEPTH  # rows are free
    unscored = make_request(acceptance="block", temperature=1.0)
    assert lengths_of(confidence, [unscored], [2], [[doubtful] * DEPTH]) == [2]


def test_lengths_of_a_batch_are_those_of_its_chains():
    rng, requests = random.Random(3), [make_request() for _ in range(5)]
    confidence = Confidence(AcceptanceModel())
    confidence.prices = Prices(row=0.2, step=0.0, level=0.0)
    depths, values = [0, 1, 2, 3, 4], [[math.log(rng.uniform(0.3, 1.0)) for _ in range(DEPTH)] for _ in range(5)]
    lengths = lengths_of(confidence, requests, depths, values)
    for row in range(5):
        assert lengths_of(confidence, [requests[row]], [depths[row]], [values[row]]) == [lengths[row]]
    assert lengths[0] == 0
    assert all(length <= depth for length, depth in zip(lengths, depths, strict=True))
