"""How a head's draft tree grows and which of its nodes are proposed, against a plain model of EAGLE-2."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.tree import Budget, DraftTree
from infer.settings.draft_tree import parse_tree
from infer.speculation.proposers.draft_loops.tree_shapes import DynamicShape, StaticShape, propose_best
from kernels.operands import Candidates
from tests.drafts import checked_tree


def grow(shape, children, depth):
    """Grow one tree as the head proposer does, in plain Python. `children(path)`: log-probabilities by token."""
    grown = [((), 0.0, -1)]  # nodes that the level extends: path of tokens, cumulative score, candidate index
    candidates: list[tuple[tuple[int, ...], int, int, float]] = []  # path, parent, level, score
    for level in range(1, depth + 1):
        fan_out = shape.fan_out(level)
        if fan_out == 0:
            break
        paths, parents, cumulative = [], [], []
        for path, path_score, index in grown:
            best = sorted(enumerate(children(path)), key=lambda pair: (-pair[1], pair[0]))[:fan_out]
            for token, score in best:
                paths.append((*path, token))
                parents.append(index)
                cumulative.append(path_score + score)
        fixed = shape.fixed(level, torch.device("cpu"))
        scores = cumulative if fixed is None else fixed[0].tolist()
        first = len(candidates)
        candidates += [(p, a, level, s) for p, a, s in zip(paths, parents, scores, strict=True)]
        if not shape.fan_out(level + 1):
            break
        best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: shape.width]
        places = best if fixed is None else fixed[1].tolist()
        grown = [(paths[place], cumulative[place], first + place) for place in places]
    return candidates


def propose(candidates, budget):
    paths, parents, levels, scores = zip(*candidates, strict=True)
    tree = propose_best(
        [99],
        Candidates(
            torch.tensor([[path[-1] for path in paths]]),
            torch.tensor([parents]),
            torch.tensor(levels),
            torch.tensor([scores]),
        ),
        [budget],
    )
    nodes = range(1, int(tree.length[0]))
    return tree, {tuple(tree.token[0, tree.path(0, node)[1:]].tolist()) for node in nodes}


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 5),
    depth=st.integers(1, 5),
    nodes=st.integers(1, 30),
    limit=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_a_dynamic_tree_holds_the_best_nodes_that_were_grown(width, depth, nodes, limit, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs: dict[tuple[int, ...], list[float]] = {}

    def children(path):
        if path not in log_probs:
            log_probs[path] = (torch.randn(7, generator=generator, dtype=torch.float64) * 2).log_softmax(0).tolist()
        return log_probs[path]

    candidates = grow(DynamicShape(width, depth), children, depth)
    tree, paths = propose(candidates, Budget(nodes, limit))
    allowed = [candidate for candidate in candidates if candidate[2] <= limit]
    assert len(paths) == min(nodes, len(allowed))
    worst_kept = min(score for path, _, _, score in allowed if path in paths)
    assert all(score <= worst_kept for path, _, _, score in allowed if path not in paths)
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)
    rebuilt = checked_tree(tree.token, tree.parent, tree.length)  # checks order and distinct siblings
    assert torch.equal(rebuilt.ancestors, tree.ancestors)


def test_ties_are_decided_by_order_so_parents_stay():
    candidates = grow(DynamicShape(2, 4), lambda path: [0.0, 0.0, 0.0], 4)  # a child scores as much as its parent
    for nodes in range(1, 12):
        _, paths = propose(candidates, Budget(nodes, 4))
        assert len(paths) == nodes
        assert all(len(path) == 1 or path[:-1] in paths for path in paths)


MEDUSA = [[0], [1], [2], [0, 0], [0, 2], [1, 0], [0, 2, 1]]


def test_a_static_tree_holds_exactly_its_paths():
    scores = {}

    def children(path):
        return scores.setdefault(path, torch.randperm(9, generator=torch.Generator().manual_seed(len(scores))).tolist())

    shape = StaticShape(MEDUSA)
    assert (shape.most, shape.depth, shape.rows, shape.widest) == (7, 3, 3, 3)
    tree, paths = propose(grow(shape, children, shape.depth), Budget(63, 3))

    def tokens(ranks):
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, sorted(range(9), key=lambda token: -children(path)[token])[rank])
        return path

    assert paths == {tokens(ranks) for ranks in MEDUSA}
    checked_tree(tree.token, tree.parent, tree.length)
    _, fewer = propose(grow(shape, children, shape.depth), Budget(3, 3))
    assert fewer == {tokens(ranks) for ranks in MEDUSA[:3]}
    _, shallow = propose(grow(shape, children, 2), Budget(63, 1))
    assert shallow == {tokens(ranks) for ranks in MEDUSA[:3]}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0]], "twice"),
        ([[0], [1, 0]], r"parent \[1\] is missing"),
        ([[]], "ranks from 0"),
        ([[-1]], "ranks from 0"),
        ([], "needs a node"),
    ],
)
def test_invalid_static_trees_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        parse_tree(paths)


def test_stacked_trees_keep_their_rows():
    trees = [
        DraftTree.chains([1, 2], [[3, 4], []]),
        propose([((5,), -1, 1, 0.0), ((6,), -1, 1, -1.0)], Budget(2, 1))[0],
    ]
    stacked = DraftTree.stack(trees, [[0, 2], [1]])
    assert stacked.length.tolist() == [3, 3, 1]
    assert stacked.token.tolist()[:2] == [[1, 3, 4], [99, 5, 6]]
    assert stacked.path(0, 2) == [0, 1, 2]
    assert stacked.path(1, 2) == [0, 2]
    assert not stacked.is_chain
