"""Acceptance in Triton's interpreter against the torch implementation, over random trees."""

from __future__ import annotations

import pytest
import torch

from infer.batch.tree import MAX_NODES, DraftTree
from kernels.operands import Nodes
from kernels.verify import accept
from tests.device import DEVICE, served, sized
from tests.drafts import checked_tree
from tests.kernels.test_verify import walk


def random_trees(lengths, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=generator))

    width = max(lengths)
    token, parent = torch.zeros(len(lengths), width, dtype=torch.int64), torch.full((len(lengths), width), -1)
    for b, length in enumerate(lengths):
        siblings = set()
        for node in range(1, length):
            node_parent, node_token = (node - 1 if draw(3) else draw(node)), draw(2)
            while (node_parent, node_token) in siblings:
                node_token += 1  # siblings carry distinct tokens
            siblings.add((node_parent, node_token))
            token[b, node], parent[b, node] = node_token, node_parent
    return checked_tree(token, parent, torch.tensor(lengths)), generator


@pytest.mark.parametrize("lengths", [[1], [5, 1, 16, 9], [MAX_NODES, 33, 2], [MAX_NODES - 1] * 3])
@pytest.mark.parametrize("seed", range(4))
def test_accept_equals_the_torch_form(monkeypatch, lengths, seed):
    tree, generator = random_trees(lengths, seed)
    choice = torch.randint(0, 2, tree.token.shape, generator=generator)
    if seed == 0:  # a chain that is accepted whole, bit 63 of the tree mask included
        tree = DraftTree.chains([0] * len(lengths), [[1] * (length - 1) for length in lengths])
        choice = torch.ones_like(tree.token)
    typical_mask = torch.rand(tree.token.shape, generator=generator) < 0.3 if seed > 1 else None
    args = (tree.nodes, choice, typical_mask)
    outputs = []
    for switch in ("torch", "triton"):
        monkeypatch.setenv("HEADWAY_KERNELS", switch)
        outputs.append(accept(*args))
    assert torch.equal(*outputs)
    if seed == 0:
        assert outputs[0].tolist() == [length - 1 for length in lengths]


TREES = sized([(3, 16), (2, 64)], [(64, 64), (256, 17), (3, 1)])


def tree_case(batch, nodes):
    """Return random trees of up to so many nodes, with choices, as `accept` takes them."""
    lengths = torch.randint(1, nodes + 1, (batch,), generator=torch.Generator().manual_seed(nodes)).tolist()
    tree, generator = random_trees(lengths, nodes)
    choice = torch.randint(0, 2, tree.token.shape, generator=generator)
    return tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, choice


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "nodes"), [served(*case) for case in TREES])
def test_accept_equals_the_walk(in_triton, compare, batch, nodes):
    token, parent, _, _, length, choice = case = tree_case(batch, nodes)
    trees = zip(token.tolist(), parent.tolist(), length.tolist(), choice.tolist(), strict=True)
    *nodes, choices = (x.to(DEVICE) for x in case)
    last = accept(Nodes(*nodes), choices)
    compare.same("accept", f"{batch} trees of up to {nodes}", last, torch.tensor([walk(*tree) for tree in trees]))
