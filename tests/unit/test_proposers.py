"""Proposers without a head: counting, matching, merging, forgetting; a failure ends drafts for its request only."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.request import Request, SamplingParams
from infer.speculation.budget import Budget
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.proposers.combined import CombinedProposer, merge
from infer.speculation.proposers.ngram import NgramProposer
from infer.speculation.proposers.suffix import CountedTrie, Earlier, SuffixProposer, Text, count_nodes, follow
from infer.speculation.speculator import Speculator
from infer.speculation.tree import DraftTree
from tests.drafts import checked_tree

DEPTH = 4
tokens_of = st.lists(st.integers(0, 3), max_size=25)


def counts(trie):
    run_counts = {}

    def walk(node, run):
        for token, child in node.children.items():
            run_counts[(*run, token)] = child.count
            walk(child, (*run, token))

    walk(trie.root, ())
    return run_counts


def runs(sequences):
    return Counter(
        tuple(sequence[start:end])
        for sequence in sequences
        for start in range(len(sequence))
        for end in range(start + 1, min(len(sequence), start + DEPTH) + 1)
    )


@settings(max_examples=100, deadline=None)
@given(sequences=st.lists(tokens_of, max_size=4), removed=st.sets(st.integers(0, 3)))
def test_the_trie_counts_every_run_and_forgets_whole_sequences(sequences, removed):
    trie = CountedTrie(DEPTH)
    for sequence in sequences:
        ends = []
        for token in sequence:
            ends = trie.extend(ends, token)
    assert counts(trie) == runs(sequences)
    for index in removed & set(range(len(sequences))):
        trie.remove(sequences[index])
    assert counts(trie) == runs([s for index, s in enumerate(sequences) if index not in removed])
    assert trie.size == count_nodes(trie.root) - 1


@settings(max_examples=100, deadline=None)
@given(tokens=tokens_of)
def test_a_text_matches_its_longest_suffix_seen_before(tokens):
    text = Text(DEPTH)
    text.read(tokens[: len(tokens) // 2])
    text.read(tokens)
    seen = runs([tokens])
    lengths = [
        length
        for length in range(1, min(len(tokens), DEPTH - 1) + 1)
        if any((*tokens[len(tokens) - length :], token) in seen for token in range(4))
    ]
    match = text.match()
    assert (match[1] if match else None) == (max(lengths) if lengths else None)
    if match:
        longest = text.trie.find(tokens)
        assert longest is not None
        assert longest[0] is match[0]


def test_a_draft_follows_the_most_frequent_continuation_while_it_is_likely():
    trie = CountedTrie(8)
    for sequence in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 9]):
        ends = []
        for token in sequence:
            ends = trie.extend(ends, token)
    node = trie.root.children[1]
    assert follow(node, 8, 0.1) == ([2, 3, 5], 0.75 + 0.75 + 0.5)
    assert follow(node, 2, 0.1)[0] == [2, 3]
    assert follow(node, 8, 0.6)[0] == [2, 3]


def test_earlier_responses_are_bounded():
    earlier = Earlier(max_depth=6, max_nodes=300)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        earlier.add(torch.randint(0, 50, (20,), generator=generator).tolist())
        assert earlier.trie.size <= 300
    assert earlier.trie.size == count_nodes(earlier.trie.root) - 1
    assert len(earlier._responses) >= 2


def test_answers_that_repeat_one_another_are_bounded_too():
    earlier = Earlier(max_depth=6, max_nodes=300)
    for _ in range(100):
        earlier.add([1, 2, 3, 4])
    assert earlier.trie.size == 4 + 3 + 2 + 1
    assert len(earlier._responses) == 300 // 4
    assert earlier.trie.root.children[1].count == 300 // 4


def make_request(tokens, prompt=1, **params):
    request = Request(
        "r" + "-".join(map(str, tokens)), tokens[:prompt], SamplingParams(max_tokens=50, **params), 0, tokens
    )
    request.computed = len(tokens) - 1
    return request


def test_suffix_drafts_from_earlier_responses_of_the_same_tenant_only():
    proposer = SuffixProposer()
    first = make_request([1, 2, 3, 4, 5, 6, 7], cache_salt="a")
    proposer.propose([first], [Budget(4, 4)])
    first.finish_reason = "stop"
    proposer.release(first)
    drafts = {}
    for salt in ("a", "b"):
        tree = proposer.propose([make_request([9, 3, 4], cache_salt=salt)], [Budget(4, 4)])
        drafts[salt] = tree.token[0, 1 : int(tree.length[0])].tolist()
    assert drafts == {"a": [5, 6, 7], "b": []}


def test_nothing_is_learnt_before_it_first_drafts_for_a_tenant():
    proposer = SuffixProposer()
    for salt in ("", "a"):
        finished = make_request([1, 2, 3, 4, 5], cache_salt=salt)
        finished.finish_reason = "length"
        proposer.release(finished)
    assert not proposer._tenants
    proposer.propose([make_request([9, 2, 3], cache_salt="a")], [Budget(4, 4)])
    assert list(proposer._tenants) == ["a"]


def test_an_aborted_answer_is_not_learnt():
    proposer = SuffixProposer()
    first = make_request([1, 2, 3, 4, 5])
    proposer.propose([first], [Budget(4, 4)])
    first.finish_reason = "abort"
    proposer.release(first)
    tree = proposer.propose([make_request([9, 2, 3])], [Budget(4, 4)])
    assert tree.length.tolist() == [1]


def test_an_answer_is_learnt_once_though_two_proposers_draw_on_it():
    suffix, ngram = SuffixProposer(), NgramProposer(1, 2)
    proposers = {"suffix": suffix, "ngram": ngram, "combined": CombinedProposer([suffix, ngram])}
    drafting = Speculator(
        {name: (proposer, Budget(3, 3)) for name, proposer in proposers.items()}, "combined", context=100
    )
    first = make_request([1, 2, 3, 2])
    drafting.propose([first], [Budget(3, 3)])
    first.finish_reason = "stop"
    drafting.release(first)
    assert counts(suffix._earlier(first).trie) == {(2,): 2, (3,): 1, (2, 3): 1, (3, 2): 1, (2, 3, 2): 1}
    assert not suffix._texts
    assert not ngram._indexes


def paths(tree, row):
    nodes = range(1, int(tree.length[row]))
    return {tuple(tree.token[row, tree.path(row, node)[1:]].tolist()) for node in nodes}


@settings(max_examples=100, deadline=None)
@given(
    chains=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=4),
    limit=st.integers(0, 20),
)
def test_a_merged_tree_is_the_union_of_its_sources(chains, limit):
    merged = merge([DraftTree.chains([9], [chain]) for chain in chains], [limit])
    checked_tree(merged.token, merged.parent, merged.length)  # validates order and distinct siblings
    union = {tuple(chain[:length]) for chain in chains for length in range(1, len(chain) + 1)}
    merged_paths = paths(merged, 0)
    assert merged_paths <= union
    assert len(merged_paths) == min(limit, len(union))
    shallow = sorted(union, key=len)
    if len(merged_paths) < len(union):  # the deepest nodes are cut
        assert max(map(len, merged_paths), default=0) <= len(shallow[limit])


class Failing(Proposer):
    """Fails if a request contains the token 13."""

    name = "failing"

    def __init__(self):
        self.released = []

    def places(self, budget):
        return budget.depth

    def propose(self, requests, budgets):
        if any(13 in request.tokens for request in requests):
            raise RuntimeError("thirteen")
        return DraftTree.chains([request.tokens[-1] for request in requests], [[7]] * len(requests))

    def release(self, request):
        self.released.append(request.request_id)


def test_a_failure_stops_drafts_for_that_request_only_and_is_said_once(caplog):
    proposer = Failing()
    drafting = Speculator({"failing": (proposer, Budget(1, 1))}, "failing", context=100)
    requests = [make_request([1, 2]), make_request([1, 13]), make_request([1, 4])]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            budgets = [drafting.budget(request) for request in requests]
            tree = drafting.propose(requests, budgets)
            assert tree.length.tolist() == [2, 1, 2]
            assert tree.token[:, 0].tolist() == [2, 13, 4]
    records = [record for record in caplog.records if "thirteen" in record.getMessage()]
    assert len(records) == 1
    assert requests[1].request_id in records[0].getMessage()
    assert proposer.released == [requests[1].request_id]
    assert drafting.budget(requests[1]) == Budget(0, 0)


def test_each_request_has_its_own_proposer_and_limits():
    proposers = {"failing": (Failing(), Budget(5, 5)), "ngram": (NgramProposer(1, 2), Budget(3, 3))}
    drafting = Speculator(proposers, "ngram", context=40)
    plain, custom = make_request([1, 2, 1, 2, 1]), make_request([5, 6], proposer="failing")
    off = make_request([1, 2, 1], speculate=False)
    short = make_request([3, 4, 3], max_draft_tokens=2)
    batch = [plain, custom, off, short]
    assert [drafting.name_for(r) for r in batch] == ["ngram", "failing", "none", "ngram"]
    budgets = [drafting.budget(r) for r in batch]
    assert budgets == [Budget(3, 3), Budget(5, 5), Budget(0, 0), Budget(2, 2)]
    tree = drafting.propose(batch, budgets)
    assert [tree.token[b, : int(tree.length[b])].tolist() for b in range(4)] == [[1, 2, 1], [6, 7], [1], [3, 4, 3]]
    with pytest.raises(ValueError, match=r"proposer=head: this engine has failing, ngram, none"):
        Speculator(proposers, "head", context=40)


def test_near_the_end_nothing_is_drafted_that_could_not_be_emitted():
    drafting = Speculator({"ngram": (NgramProposer(1, 2), Budget(3, 3))}, "ngram", context=10)
    for length, expected in itertools.product(range(5, 10), [None]):
        request = make_request(list(range(length)))
        assert drafting.budget(request).depth == max(0, min(3, 10 - length - 1)), expected
    assert isinstance(NoProposer().propose([make_request([1, 2])], [Budget(0, 0)]), DraftTree)
