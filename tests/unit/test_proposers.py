"""How the speculator treats proposers: each request has its own, and a failure ends drafts for its request only."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.config import ProposerConfig
from infer.request import PLAIN, Drafter, DrafterState, Needs, Proposer, ProposerState
from infer.speculation.proposers import SELF_LIMITING, build_proposers
from infer.speculation.proposers.combined import CombinedProposer
from infer.speculation.proposers.ngram import NgramProposer
from infer.speculation.speculator import Speculator
from infer.steps.step import features_of
from tests.drafts import make_request


class Failing(Proposer):
    """Fails if a request contains the token 13."""

    name = "failing"

    def places(self, budget):
        return budget.depth

    def propose(self, requests, states, budgets):
        if any(13 in request.tokens for request in requests):
            raise RuntimeError("thirteen")
        return DraftTree.chains([request.tokens[-1] for request in requests], [[7]] * len(requests))


def test_a_failure_stops_drafts_for_that_request_only_and_is_said_once(caplog):
    proposer = Failing()
    drafting = Speculator({"failing": lambda: (proposer, Budget(1, 1))}, "failing", context=100)
    requests = [make_request([1, 2]), make_request([1, 13]), make_request([1, 4])]
    for request in requests:
        drafting.assign(request)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            budgets = [request.drafter.budget(request) for request in requests]
            tree = drafting.propose(requests, budgets)
            assert tree.length.tolist() == [2, 1, 2]
            assert tree.token[:, 0].tolist() == [2, 13, 4]
    records = [record for record in caplog.records if "thirteen" in record.getMessage()]
    assert len(records) == 1
    assert requests[1].request_id in records[0].getMessage()
    assert [request.drafter.proposer for request in requests] == [proposer, PLAIN, proposer]
    assert requests[1].drafter.budget(requests[1]) == Budget(0, 0)


def test_each_request_has_its_own_proposer_and_limits():
    proposers = {
        "failing": cache(lambda: (Failing(), Budget(5, 5))),
        "ngram": cache(lambda: (NgramProposer(1, 2), Budget(3, 3))),
    }
    drafting = Speculator(proposers, "ngram", context=40)
    plain, custom = make_request([1, 2, 1, 2, 1]), make_request([5, 6], proposer="failing")
    off = make_request([1, 2, 1], speculate=False)
    short = make_request([3, 4, 3], max_draft_tokens=2)
    batch = [plain, custom, off, short]
    for request in batch:
        drafting.assign(request)
    assert [r.drafter.name for r in batch] == ["ngram", "failing", "none", "ngram"]
    budgets = [r.drafter.budget(r) for r in batch]
    assert budgets == [Budget(3, 3), Budget(5, 5), Budget(0, 0), Budget(2, 2)]
    tree = drafting.propose(batch, budgets)
    assert [tree.token[b, : int(tree.length[b])].tolist() for b in range(4)] == [[1, 2, 1], [6, 7], [1], [3, 4, 3]]
    with pytest.raises(ValueError, match=r"proposer=head: this engine has failing, ngram, none"):
        Speculator(proposers, "head", context=40)


def test_near_the_end_nothing_is_drafted_that_could_not_be_emitted():
    drafting = Speculator({"ngram": lambda: (NgramProposer(1, 2), Budget(3, 3))}, "ngram", context=10)
    for length, expected in itertools.product(range(5, 10), [None]):
        request = make_request(list(range(length)))
        drafting.assign(request)
        assert request.drafter.budget(request).depth == max(0, min(3, 10 - length - 1)), expected
    assert isinstance(PLAIN.propose([make_request([1, 2])], [None], [Budget(0, 0)]), DraftTree)


@dataclass
class Taken(ProposerState):
    features: list[Tensor] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def end(self, request):
        self.ended.append(request.request_id)


class Following(Proposer):
    """Follows requests, and keeps the features that it gets."""

    needs = Needs(aux_layers=(1,))

    def __init__(self, name):
        self.name = name

    def begin(self, request):
        return Taken()

    def commit(self, requests, states, features):
        for state, rows in zip(states, features, strict=True):
            state.features.append(rows)


def test_each_request_has_a_state_of_its_own_until_it_ends_or_is_begun_anew():
    proposers = {name: lambda name=name: (Following(name), Budget(1, 1)) for name in ("one", "other")}
    drafting = Speculator(proposers, "one", context=100)
    batch = [make_request([1, 2]), make_request([3, 4], proposer="other"), make_request([5, 6]), make_request([7, 8])]
    for request in batch:
        drafting.assign(request)
    batch[3].drafter.state = DrafterState.NONE
    features = [torch.full((n, 2), float(n)) for n in (1, 2, 3, 4)]
    drafting.commit(batch, features)
    states = [request.drafter.kept for request in batch]
    assert [[len(rows) for rows in state.features] for state in states] == [[1], [2], [3], []]
    drafting.sync([], batch[:1])  # pre-empted
    assert batch[0].drafter.kept.features == []
    assert batch[2].drafter.kept is states[2]
    drafting.forget(batch[1])
    assert [state.ended for state in states] == [[], [batch[1].request_id], [], []]
    assert type(batch[1].drafter.kept) is ProposerState


@pytest.mark.parametrize("interface", [Proposer, ProposerState, Needs])
def test_an_interface_is_read_at_a_glance(interface):
    """Every public name of a base class counts, which its users may use and its subclasses may override."""
    inherited = {name for base in interface.__mro__[1:] for name in vars(base)}
    declared = {*vars(interface), *vars(interface).get("__annotations__", {})}
    assert 0 < len([name for name in declared - inherited if not name.startswith("_")]) <= 8


def built(proposers):
    return [name for name, build in proposers.items() if build.cache_info().currsize]


def test_a_proposer_is_built_when_it_is_first_asked_for(tmp_path):
    """By the default, a request, or as a source of another; one whose file may be refused at once."""
    config = ProposerConfig(name="combined", sources=["ngram", "suffix"])
    proposers = build_proposers(config, None, None, vocab_size=90)
    drafting = Speculator(proposers, "ngram", context=40)
    assert drafting.names == ["combined", "ngram", "none", "suffix"]
    drafting.assign(make_request([1, 2], speculate=False))
    assert built(proposers) == []
    drafting.assign(make_request([1, 2]))
    assert built(proposers) == ["ngram"]
    drafting.assign(request := make_request([1, 2], proposer="combined"))
    assert isinstance(request.drafter.proposer, CombinedProposer)
    assert request.drafter.proposer.sources == (proposers["ngram"]()[0], proposers["suffix"]()[0])
    assert {name for name, build in proposers.items() if build()[0].self_limiting} == SELF_LIMITING
    (tmp_path / "file").write_text("no responses")
    with pytest.raises(ValueError, match="is no file of responses"):
        build_proposers(replace(config, memory=str(tmp_path / "file")), None, None, vocab_size=90)


def test_features_are_selected_for_those_who_read_them():
    """Of a verify that computed them for all its rows, since one request wants them."""
    requests = [make_request([1, 2]), make_request([3, 4]), make_request([5, 6])]
    for request in requests[::2]:
        request.drafter = Drafter(Following("one"), Budget(1, 1), 100)
    requests[2].drafter.state = DrafterState.NONE
    aux = [torch.arange(5.0)[:, None], torch.arange(5.0)[:, None] + 10]
    selected = features_of(requests, aux, [(0, 2), (3,), (4,)])
    assert [rows.tolist() for rows in selected] == [[[0, 10], [2, 12]], [], []]
