"""Acceptance over random trees against its definition: go down from the root while a child equals the choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.tree import MAX_NODES, DraftTree
from kernels.rows import AttentionRows
from kernels.verify import accept, accept_in_torch
from tests.drafts import checked_tree


def walk(token, parent, length, choice):
    node = 0
    while True:
        children = [i for i in range(1, length) if parent[i] == node and token[i] == choice[node]]
        if not children:
            return node
        (node,) = children


@st.composite
def trees(draw):
    length = draw(st.integers(1, MAX_NODES))
    parent, token, siblings = [-1], [0], set()
    for node in range(1, length):
        node_parent = draw(st.integers(0, node - 1))
        node_token = draw(st.integers(0, 3))
        while (node_parent, node_token) in siblings:
            node_token += 1  # siblings carry distinct tokens
        siblings.add((node_parent, node_token))
        parent.append(node_parent)
        token.append(node_token)
    return token, parent


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_accept_equals_the_walk(cases, seed):
    width = max(len(token) for token, _ in cases)
    pad = [[*token, *[0] * (width - len(token))] for token, _ in cases]
    parents = [[*parent, *[0] * (width - len(parent))] for _, parent in cases]
    length = torch.tensor([len(token) for token, _ in cases])
    tree = checked_tree(torch.tensor(pad), torch.tensor(parents), length)
    choice = torch.randint(0, 3, (len(cases), width), generator=torch.Generator().manual_seed(seed))
    last = accept(tree.nodes, choice)
    assert torch.equal(accept_in_torch(tree.nodes, choice), last)
    for b, (token, parent) in enumerate(cases):
        node = walk(token, parent, len(token), choice[b].tolist())
        assert int(last[b]) == node
        path = [node]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        assert tree.path(b, node) == path


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 2**31))
def test_likely_nodes_are_taken_besides(case, seed):
    """Typical acceptance (arXiv 2401.10774): the longest path whose nodes are each chosen or in `typical_mask`."""
    token, parent = case
    generator = torch.Generator().manual_seed(seed)
    tree = checked_tree(torch.tensor([token]), torch.tensor([parent]), torch.tensor([len(token)]))
    choice = torch.randint(0, 3, (1, len(token)), generator=generator)
    typical_mask = torch.rand(1, len(token), generator=generator) < 0.5
    depth, best = [0] + [-1] * (len(token) - 1), 0
    for node in range(1, len(token)):
        above = parent[node]
        if depth[above] >= 0 and (token[node] == choice[0, above] or typical_mask[0, node]):
            depth[node] = depth[above] + 1
            best = node if depth[node] > depth[best] else best
    parts = tree.nodes, choice, typical_mask
    assert int(accept(*parts)) == int(accept_in_torch(*parts)) == best


def test_chains_equal_trees_made_from_parents():
    chain = DraftTree.chains([7, 8], [list(range(63)), [5]])
    built = checked_tree(chain.token, chain.parent, chain.length)
    inside = torch.arange(64) < chain.length[:, None]  # entries past the length are padding
    assert torch.equal(chain.ancestors[inside], built.ancestors[inside])
    assert torch.equal(chain.depth[inside], built.depth[inside])
    assert chain.is_chain


@given(st.lists(trees(), min_size=1, max_size=4))
def test_rows_and_depths_are_those_of_the_nodes(cases):
    width = max(len(token) for token, _ in cases)
    pad = [[*token, *[9] * (width - len(token))] for token, _ in cases]
    parents = [[*parent, *[0] * (width - len(parent))] for _, parent in cases]
    length = torch.tensor([len(token) for token, _ in cases])
    tree = checked_tree(torch.tensor(pad), torch.tensor(parents), length)
    assert tree.rows(tree.token).tolist() == [token for tokens, _ in cases for token in tokens]
    assert tree.depths() == [int(tree.depth[b, : len(tokens)].max()) for b, (tokens, _) in enumerate(cases)]
    chain = DraftTree.chains([tokens[0] for tokens, _ in cases], [tokens[1:] for tokens, _ in cases])
    assert torch.equal(chain.rows(chain.token), tree.rows(tree.token))
    assert chain.depths() == [len(tokens) - 1 for tokens, _ in cases]


@pytest.mark.parametrize("tree_mask", [None, torch.tensor([[1, 3], [1, 2], [1, 3]])])
def test_rows_laid_out_in_a_grid(tree_mask):
    table = torch.arange(12).view(3, 4)
    mask = None if tree_mask is None else tree_mask.flatten()
    rows = AttentionRows.blocks(table, [5, 9, 2], [2, 2, 2], page_size=4, tree_mask=mask)
    where = torch.arange(3), torch.tensor([4, 8, 1])
    grid = AttentionRows.grid(table, *where, 2, shift=1, page_size=4, longest=rows.longest, tree_mask=tree_mask)
    for name in ("table", "request", "committed", "offset", "places", "slots"):
        assert torch.equal(getattr(grid, name), getattr(rows, name)), name
    assert grid.counts == rows.counts
    assert mask is None or torch.equal(grid.tree_mask, mask)
