"""Advancing requests in Triton's interpreter against the torch implementation: equal integers, in one launch."""

from __future__ import annotations

import torch

from infer.batch.tree import MAX_NODES, DraftTree
from kernels.advance import advance
from kernels.operands import LEADING, Nodes, Progress
from kernels.triton import SWITCH
from tests.kernels.triton.test_verify import random_trees
from tests.operations import counted
from tests.pairwise import parametrize_pairs

PAGE, WIDTH = 4, 60  # of a block table's rows


def progress_of(batch, capacity, seed):
    generator = torch.Generator().manual_seed(seed)

    def numbers(high, *shape):
        return torch.randint(high, shape or (batch,), generator=generator)

    roots = numbers(100)
    slots = torch.randperm(batch + 2, generator=generator)[:batch]
    ids = numbers(9, batch, capacity + 3)
    return Progress(
        slots, roots, roots + numbers(6), ids, numbers(9), numbers(9), numbers(9, batch, LEADING + 2 * capacity)
    )


@parametrize_pairs(
    {
        "lengths": [[1], [5, 1, 16, 9], [MAX_NODES, 33, 2], [MAX_NODES - 1] * 3],
        "seed": range(5),
        "spare": [0, 2],
    }
)
def test_both_forms_leave_the_same_state(monkeypatch, lengths, seed, spare):
    tree, generator = random_trees(lengths, seed)
    choice = torch.randint(0, 2, tree.token.shape, generator=generator)
    if seed < 2:  # chains that are accepted whole, or in part
        tree = DraftTree.chains([0] * len(lengths), [[1] * (length - 1) for length in lengths])
        choice = torch.ones_like(tree.token) if not seed else choice
    tree.length = tree.length - (tree.length > 3).long()  # a padded tree has more entries than nodes
    nodes = Nodes(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length)
    table = torch.randperm(8 * WIDTH, generator=generator).view(8, WIDTH)
    outcomes = []
    for switch in ("torch", "triton"):
        monkeypatch.setenv(SWITCH, switch)
        progress = progress_of(len(lengths), tree.path_width + spare, seed)
        with counted() as launches:
            accepted = advance(nodes, choice, progress, table, PAGE, width=tree.path_width, is_chain=tree.is_chain)
        outcomes.append((progress, accepted))
    assert launches.total == 1
    (progress, accepted), (other, also_accepted) = outcomes
    for name, column, same in zip(Progress._fields, progress, other, strict=True):
        assert torch.equal(column, same), name
    assert all(map(torch.equal, accepted[:3], also_accepted[:3]))
    assert (accepted.moves is None) == (also_accepted.moves is None) == tree.is_chain
    if accepted.moves is not None:
        assert all(map(torch.equal, accepted.moves, also_accepted.moves))
    if seed == 0:
        assert accepted.depth.tolist() == [length - 1 - (length > 3) for length in lengths]
