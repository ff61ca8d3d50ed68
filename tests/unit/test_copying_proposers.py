"""Proposers that copy from texts: what they match, draft and remember; and how drafts are merged."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.tree import Budget, DraftTree
from infer.config import ProposerConfig
from infer.request import Proposer, ProposerState
from infer.speculation.proposers.combined import CombinedProposer, assembled
from infer.speculation.proposers.merging import Drafted, accepted, merge
from infer.speculation.proposers.ngram import NgramProposer
from infer.speculation.proposers.suffix_decoding.automaton import MOST_COUNTED, ROOT, Match, SuffixAutomaton
from infer.speculation.proposers.suffix_decoding.drafts import follow
from infer.speculation.proposers.suffix_decoding.proposer import SuffixProposer
from infer.speculation.proposers.suffix_decoding.responses import EarlierResponses, ResponseFile, digest
from infer.speculation.speculator import Speculator
from tests.drafts import checked_tree, make_request, propose

tokens_of = st.lists(st.integers(0, 2), max_size=20)
FAR = Budget(16, 16)


def automaton_of(sequences):
    automaton = SuffixAutomaton()
    for sequence in sequences:
        automaton.begin()
        for token in sequence:
            automaton.append(token)
    return automaton


def state_of(automaton: SuffixAutomaton, run: Sequence[int]) -> int:
    """Return the state of a run; -1 if it did not occur."""
    state = ROOT
    for token in run:
        if token not in automaton.edges[state]:
            return -1
        state = automaton.edges[state][token].target
    return state


def followers(sequences, run):
    """How often each token followed a run, by looking everywhere."""
    return Counter(
        sequence[start + len(run)]
        for sequence in sequences
        for start in range(len(sequence) - len(run))
        if sequence[start : start + len(run)] == run
    )


@settings(max_examples=200, deadline=None)
@given(sequences=st.lists(tokens_of, min_size=1, max_size=4))
def test_an_automaton_counts_what_followed_every_run(sequences):
    automaton = automaton_of(sequences)
    for sequence in sequences:
        for start in range(len(sequence)):
            for end in range(start + 1, len(sequence) + 1):
                state = state_of(automaton, sequence[start:end])
                counted = {token: edge.count for token, edge in automaton.edges[state].items()}
                assert counted == followers(sequences, sequence[start:end])
    assert len(automaton.length) <= max(1, 2 * sum(map(len, sequences)))


@settings(max_examples=200, deadline=None)
@given(earlier=st.lists(tokens_of, min_size=1, max_size=3), text=tokens_of, later=tokens_of)
def test_a_match_is_the_longest_suffix_that_occurred_though_the_automaton_grows(earlier, text, later):
    automaton, match = automaton_of(earlier), Match()
    for token in text:
        match.extend(automaton, token)
    suffixes = [text[start:] for start in range(len(text) + 1)]
    longest = next(suffix for suffix in suffixes if state_of(automaton, suffix) >= 0)
    assert match.length == len(longest)
    automaton.begin()
    for token in later:
        automaton.append(token)
    match.settle(automaton)
    assert match.state == state_of(automaton, longest)


def test_a_text_of_one_token_costs_no_more_than_the_bound():
    automaton = automaton_of([[7] * 500])
    edge = automaton.edges[ROOT][7]
    assert edge.count <= MOST_COUNTED + 1
    assert len(automaton.length) <= 1000


def test_a_draft_takes_what_most_often_followed_and_of_several_the_latest():
    automaton = automaton_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 9], [8, 6], [8, 7]])
    state = state_of(automaton, [1])
    always = lambda length: 1.0  # noqa: E731
    assert follow(automaton, state, 1, always, 8, 0.1) == ([2, 3, 5], [0.75, 0.75, 0.5])
    assert follow(automaton, state, 1, always, 2, 0.1).tokens == [2, 3]
    assert follow(automaton, state, 1, always, 8, 0.6).tokens == [2, 3]
    assert follow(automaton, state_of(automaton, [8]), 1, always, 8, 0.1).tokens == [7]
    halves = follow(automaton, state, 1, lambda length: 0.5, 8, 0.1)
    assert halves == ([2, 3], [0.375, 0.1875])


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end():
    automaton = automaton_of([[1, 2, 3] * 4])
    state = automaton.link[automaton.end]
    assert follow(automaton, state, automaton.length[state], lambda length: 1.0, 7, 0.1).tokens == [1, 2, 3, 1, 2, 3, 1]


def suffix_proposer(most_responses: int = 100, file: ResponseFile | None = None, **options: Any) -> SuffixProposer:
    return SuffixProposer(EarlierResponses(most_responses, file), **options)


def drafted(proposer, request, budget=FAR):
    tree = propose(proposer, [request], [budget])
    return tree.token[0, 1 : int(tree.length[0])].tolist()


def finish(proposer, request, reason="stop"):
    drafted(proposer, request)
    request.finish_reason = reason
    request.drafter.kept.end(request)


FILE = list(range(100, 500))  # a text without repetitions


def right_tokens(draft, response):
    return next((place for place, token in enumerate(draft) if response[place : place + 1] != [token]), len(draft))


def copied(proposer, depth):
    """τ of a response that repeats its prompt, but for two tokens."""
    response = FILE[:]
    response[150], response[300] = 7, 8
    request = make_request([*FILE, 1, *response[:2]], prompt=len(FILE) + 1)
    steps = 0
    left = response[2:]
    while left:
        draft = drafted(proposer, request, Budget(depth, depth))
        right = right_tokens(draft, left)
        request.tokens.extend(left[: right + 1])
        left, steps = left[right + 1 :], steps + 1
    return len(response) / steps


@pytest.mark.parametrize("depth", [4, 8, 16, 32])
def test_an_edited_copy_is_drafted_as_deep_as_the_budget(depth):
    tau = copied(suffix_proposer(), depth)
    assert tau > 0.75 * (depth + 1)
    assert tau > 0.95 * copied(NgramProposer(2, 4), depth)
    budget = Budget(depth, depth)
    combined = CombinedProposer({"suffix": (suffix_proposer(), budget), "ngram": (NgramProposer(2, 4), budget)})
    assert copied(combined, depth) > 0.95 * tau


def test_an_interrupted_copy_goes_on_where_it_left_off():
    prompt = [10, 11, 12, 13, 14, 15, 16, 17, 3, 18, 19, 20, 5, 3, 40, 5, 3, 41]
    request = make_request([*prompt, 10, 11, 12, 13, 14, 15, 16], prompt=len(prompt))
    proposer = suffix_proposer(min_probability=0.0)
    drafted(proposer, request)
    request.tokens.extend([77, 3])  # for 17; what followed 3 last is 41
    assert drafted(proposer, request)[:3] == [18, 19, 20]


def test_the_chance_of_a_copy_follows_from_how_copies_went_on():
    good, bad = suffix_proposer(), suffix_proposer()
    period = list(range(20, 30))
    request = make_request(period * 8, prompt=5)
    drafted(good, request)
    noise = random.Random(0)
    tokens = [token for _ in range(40) for token in (1, 2, noise.randrange(100, 10_000))]
    misled = make_request([*tokens, 1, 2], prompt=5)
    drafted(bad, misled)
    assert min(request.drafter.kept.chances) > 0.5
    assert all(chance < 0.2 for chance in misled.drafter.kept.chances)


def test_limits_of_a_draft_are_the_documents_options():
    tokens = [*range(50, 90), 1, *range(50, 60)]
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 16),
        ({"max_depth": 3}, 3),
        ({"factor": 0.5}, 5),  # of the ten tokens that match
        ({"min_probability": 1.0}, 0),
    ]
    for options, length in cases:
        assert len(drafted(suffix_proposer(**options), make_request(tokens, prompt=45))) == length, options


def test_suffix_drafts_from_earlier_responses_of_the_same_tenant_only():
    proposer = suffix_proposer()
    finish(proposer, make_request([1, 2, 3, 4, 5, 6, 7], cache_salt="a"))
    assert drafted(proposer, make_request([9, 2, 3, 4], cache_salt="a")) == [5, 6, 7]
    assert drafted(proposer, make_request([9, 2, 3, 4], cache_salt="b")) == []


def test_an_response_that_ends_while_another_is_drafted_is_copied_from():
    proposer = suffix_proposer()
    running = make_request([9, 2, 3, 4])
    assert drafted(proposer, running) == []
    finish(proposer, make_request([1, 2, 3, 4, 5, 6, 7]))
    assert drafted(proposer, running) == [5, 6, 7]


@pytest.mark.parametrize("reason", ["abort", "error", "deadline"])
def test_an_response_that_was_broken_off_is_not_remembered(reason):
    proposer = suffix_proposer()
    finish(proposer, make_request([1, 2, 3, 4, 5]), reason)
    assert drafted(proposer, make_request([9, 2, 3, 4])) == []


def test_no_earlier_responses_with_a_bound_of_none():
    proposer = suffix_proposer(most_responses=0)
    finish(proposer, make_request([1, 2, 3, 4, 5, 6, 7]))
    assert drafted(proposer, make_request([9, 2, 3, 4])) == []


@settings(max_examples=100, deadline=None)
@given(
    responses=st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=30)), max_size=40
    ),
    most_responses=st.integers(1, 12),
    most_tokens=st.integers(2, 100),
)
def test_what_is_remembered_is_bounded_and_holds_the_newest(responses, most_responses, most_tokens):
    memory = EarlierResponses(most_responses, most_tokens=most_tokens)
    for tenant, tokens in responses:
        memory.add(tenant, tokens)
        generations = [generation for salt in "abc" for generation in memory.of(salt)]
        assert sum(generation.automaton.tokens for generation in generations) <= most_tokens
        assert sum(generation.responses for generation in generations) <= most_responses
        newest = memory.of(tenant)[0].automaton
        assert state_of(newest, tokens[: most_tokens // 2]) >= 0


def test_an_response_is_remembered_once_though_two_proposers_draw_on_it():
    suffix, ngram = suffix_proposer(), NgramProposer(1, 2)
    limits = {"suffix": (suffix, Budget(3, 3)), "ngram": (ngram, Budget(3, 3))}
    combined = CombinedProposer(limits), Budget(3, 3)
    speculator = Speculator({"combined": lambda: combined}, "combined", context=100)
    request = make_request([1, 2, 3, 2])
    speculator.assign(request)
    speculator.propose([request], [Budget(3, 3)])
    request.finish_reason = "stop"
    speculator.forget(request)
    (generation,) = suffix._responses.of("")
    assert generation.responses == 1
    assert type(request.drafter.kept) is ProposerState


# ---- the file of earlier responses -----------------------------------------------------------------------------------


def test_responses_survive_a_restart_for_their_tenant(tmp_path):
    path = str(tmp_path / "folder" / "responses.jsonl")
    finish(suffix_proposer(file=ResponseFile(path, 1000)), make_request([1, 2, 3, 4, 5, 6, 7], cache_salt="a secret"))
    again = suffix_proposer(file=ResponseFile(path, 1000))
    assert drafted(again, make_request([9, 2, 3, 4], cache_salt="a secret")) == [5, 6, 7]
    assert drafted(again, make_request([9, 2, 3, 4])) == []
    assert "a secret" not in Path(path).read_text()


def test_a_file_may_be_read_by_its_owner_alone(tmp_path):
    path = tmp_path / "responses.jsonl"

    def mode() -> int:
        return path.stat().st_mode & 0o777

    before = os.umask(0)
    try:
        assert list(ResponseFile(str(path), 1000).read(3, 100)) == []
        assert mode() == 0o600
        path.unlink()
        ResponseFile(str(path), 1000).append("t", [1])  # somebody has moved it away
        assert mode() == 0o600
        path.write_text('{"vocabulary": 1000}\n{"tenant": "t", "ids": [1, 2]}\n')
        for others in (0o644, 0o660):  # of a version that did not care
            path.chmod(others)
            assert list(ResponseFile(str(path), 1000).read(3, 100)) == [("t", [1, 2])]
            assert mode() == 0o600
    finally:
        os.umask(before)


def test_a_file_keeps_the_newest_responses_and_leaves_out_what_it_cannot_read(tmp_path):
    path = tmp_path / "responses.jsonl"
    file = ResponseFile(str(path), 1000)
    assert list(file.read(3, 100)) == []
    for last in range(6):
        file.append(digest(""), [1, 2, last])
    with path.open("a") as lines:
        lines.write('{"tenant": "x", "ids": [5000]}\n{"tenant": "x", "ids": [1, 2')  # outside the vocabulary; cut off
    assert [tokens[-1] for _, tokens in ResponseFile(str(path), 1000).read(3, 100)] == [3, 4, 5]
    assert len(path.read_text().splitlines()) == 4  # the rest is gone, so that the file stays bounded
    assert [tokens[-1] for _, tokens in ResponseFile(str(path), 1000).read(3, 6)] == [4, 5]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"vocabulary": 7}\n', "holds responses in a vocabulary of 7 tokens, and this target has 1000"),
        ("some notes\n", "is no file of responses"),
        ("[1]\n", "is no file of responses"),
        ("\xff\xfe", "is no file of responses"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path, text, complaint):
    path = tmp_path / "responses.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=complaint):
        list(ResponseFile(str(path), 1000).read(3, 100))
    assert path.read_text(encoding="latin-1") == text


def test_a_file_that_cannot_be_written_is_an_error_at_start_and_a_warning_later(tmp_path, caplog):
    with pytest.raises(ValueError, match="proposer.memory=/proc/responses: cannot be written"):
        list(ResponseFile("/proc/responses", 1000).read(3, 100))
    file = ResponseFile(str(tmp_path / "responses.jsonl"), 1000)
    assert list(file.read(3, 100)) == []
    (tmp_path / "responses.jsonl").unlink()
    (tmp_path / "responses.jsonl").mkdir()
    for _ in range(2):
        file.append("", [1, 2])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"proposer.memory={tmp_path / 'responses.jsonl'}"
    ]
    assert json.dumps([1, 2]) not in caplog.text


# ---- n-gram lookup -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 5}, (2, 5)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_max": 5, "prompt_lookup_min": 5}, (5, 5)),
    ],
)
def test_sizes_of_ngrams_are_the_documents_options(options, sizes):
    shortest, longest = ProposerConfig("ngram", **options).lookup_sizes
    assert (shortest, longest) == sizes
    proposer = NgramProposer(shortest, longest)
    text = [*range(10, 20), 7]
    for length in range(1, 8):  # tokens that match
        draft = drafted(proposer, make_request([*text, *range(20 - length - 3, 17)], prompt=3))
        assert bool(draft) == (length >= shortest), length


def test_fewest_tokens_above_most_is_an_error():
    with pytest.raises(ValueError, match="proposer.prompt_lookup_min=6: is more than proposer.prompt_lookup_max=4"):
        ProposerConfig("ngram", prompt_lookup_min=6)


# ---- merging -------------------------------------------------------------------------------------------------------


def chain(tokens, chances):
    return Drafted([9, *tokens], list(range(-1, len(tokens))), [1.0, *chances])


def paths(tree, row):
    nodes = range(1, int(tree.length[row]))
    return [tuple(tree.token[row, tree.path(row, node)[1:]].tolist()) for node in nodes]


def falling(rates):
    product, chances = 1.0, []
    for rate in rates:
        product *= rate
        chances.append(product)
    return chances


chains_of = st.lists(st.lists(st.tuples(st.integers(0, 2), st.floats(0.05, 0.99)), max_size=6), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(chains=chains_of, limit=st.integers(0, 20))
def test_a_merged_tree_has_the_likeliest_nodes_of_its_sources(chains, limit):
    drafts = [chain([t for t, _ in each], falling([rate for _, rate in each])) for each in chains]
    tree = assembled([merge(drafts, limit, 0.0)])
    checked_tree(tree.token, tree.parent, tree.length)  # validates order and distinct siblings
    union = {tuple(t for t, _ in each[:length]) for each in chains for length in range(1, len(each) + 1)}
    merged = paths(tree, 0)
    assert set(merged) <= union
    assert len(merged) == min(limit, len(union))
    fewer = paths(assembled([merge(drafts, max(0, limit - 1), 0.0)]), 0)
    assert merged[: len(fewer)] == fewer  # a smaller budget gets the first nodes of a larger one


def test_of_two_first_tokens_the_likelier_counts_and_the_other_as_far_as_it_is_wrong():
    tokens, parents = merge([chain([1, 2], [0.9, 0.8]), chain([5, 6], [0.5, 0.4])], 8, 0.1)
    assert (tokens, parents) == ([9, 1, 2], [-1, 0, 1])  # 0.1 of 0.5 is not worth a row
    tokens, parents = merge([chain([1, 2], [0.4, 0.3]), chain([5, 6], [0.5, 0.4])], 3, 0.1)
    assert (tokens, parents) == ([9, 5, 6, 1], [-1, 0, 1, 0])


def test_accepted_nodes_are_those_on_the_path_of_the_emitted_tokens():
    draft = Drafted([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3], [1.0, 0.5, 0.5, 0.4, 0.3])
    assert accepted(draft, [2, 3, 5]) == [2, 3]
    assert accepted(draft, [7]) == []
    assert accepted(draft, [2, 3, 4, 6]) == [2, 3, 4]


def test_a_proposer_without_estimates_is_ranked_by_what_was_accepted():
    """N-gram lookup that is always wrong loses its rows to one that is right."""
    right, wrong = NgramProposer(2, 4), NgramProposer(1, 1)
    wrong.name = "wrong"
    combined = CombinedProposer({"wrong": (wrong, Budget(2, 2)), "ngram": (right, Budget(2, 2))})
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 9, (40,), generator=generator).tolist()
    request = make_request([*pool, *pool[:2]], prompt=40)
    hits = 0
    for step in range(30):
        tree = propose(combined, [request], [Budget(1, 1)])
        token = pool[(step + 2) % 40]
        hits += int(tree.length[0]) > 1 and int(tree.token[0, 1]) == token
        request.tokens.append(token)
    alone = NgramProposer(2, 4)
    again = make_request([*pool, *pool[:2]], prompt=40)
    best = 0
    for step in range(30):
        token = pool[(step + 2) % 40]
        best += drafted(alone, again, Budget(1, 1))[:1] == [token]
        again.tokens.append(token)
    assert hits >= best - 2


class Fixed(Proposer):
    """Drafts the same tokens in every step."""

    name = "fixed"

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, requests, states, budgets):
        return DraftTree.chains([request.tokens[-1] for request in requests], [self.tokens for _ in requests])


@dataclass
class Chances(ProposerState):
    chances: list[float]


class Estimated(Fixed):
    """The same, each token with a probability of 0.6 if those before it are right."""

    name, self_limiting = "estimated", True

    def begin(self, request):
        return Chances(falling([0.6] * len(self.tokens)))


def test_beside_a_better_copy_one_that_agrees_adds_nothing():
    text, budget = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], Budget(4, 4)
    combined = CombinedProposer({"ngram": (NgramProposer(2, 4), budget), "suffix": (suffix_proposer(), budget)})
    both = [make_request(text), make_request([*text, 4])]
    tree, expected = (propose(each, both, [budget] * 2) for each in (combined, suffix_proposer()))
    assert tree.is_chain
    assert torch.equal(tree.token, expected.token)
    assert torch.equal(tree.length, expected.length)


def test_copies_that_contradict_better_ones_are_drafted_as_long_as_that_pays():
    budget = Budget(2, 2)
    combined = CombinedProposer({"wrong": (Fixed([8, 8]), budget), "right": (Estimated([5, 5]), budget)})
    request, first_level = make_request([1, 5]), list[int]()
    for _ in range(60):
        tree = propose(combined, [request], [Budget(4, 4)])
        first_level.append(int((tree.parent[0, 1 : int(tree.length[0])] == 0).sum()))
        request.tokens.extend([5, 5])
    assert first_level[0] == 2
    assert first_level[-1] == 1
