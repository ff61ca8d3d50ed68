"""Draft trees in Triton's interpreter against the torch implementation: the same nodes, in one launch each."""

from __future__ import annotations

import pytest
import torch

from infer.speculation.proposers.draft_loops.tree_shapes import DynamicShape, StaticShape, grow
from kernels.operands import Frontier
from kernels.tree import best_nodes, grow_level
from kernels.triton import SWITCH
from tests.drafts import checked_tree
from tests.operations import counted

BATCH = 3
SHAPES = [
    DynamicShape(4, 5),
    DynamicShape(1, 3),
    DynamicShape(7, 3),
    StaticShape([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 2]]),
]


def grown(shape, deepest, *, alike):
    """Grow trees whose children have few different log-probabilities; `alike`: all nodes have the same children."""
    generator, masks = torch.Generator().manual_seed(deepest), []
    nodes = 1

    def children(level, fan_out):
        size = (BATCH, 1 if alike else nodes, fan_out)
        token = torch.rand(*size[:2], 30, generator=generator).sort(dim=-1).indices[..., :fan_out]
        return token, torch.randint(-5, 0, size, generator=generator) / 2

    def run(level, picked):
        nonlocal nodes
        nodes = picked.token.shape[1]
        masks.append((picked.parent, picked.token, *picked.frontier))

    with counted() as launches:
        candidates = grow(shape, deepest, torch.arange(BATCH), children, run)
    return candidates, masks, launches


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("shallower", [0, 1])
def test_trees_grow_alike(monkeypatch, shape, alike, shallower):
    deepest = shape.depth - shallower
    monkeypatch.setenv(SWITCH, "torch")
    expected, expected_masks, _ = grown(shape, deepest, alike=alike)
    monkeypatch.setenv(SWITCH, "triton")
    actual, masks, launches = grown(shape, deepest, alike=alike)
    assert all(map(torch.equal, actual, expected))
    for level, expected_level in zip(masks, expected_masks, strict=True):
        assert all(map(torch.equal, level, expected_level))
    assert launches.names["grow_kernel"] == deepest


def test_values_that_are_no_numbers_pick_candidates_that_exist(monkeypatch):
    """A parent that does not exist would be read, which ends the process on a GPU."""
    monkeypatch.setenv(SWITCH, "triton")
    token = torch.arange(BATCH * 5).view(BATCH, 1, 5)
    value = torch.full((BATCH, 1, 5), torch.nan)
    picked = grow_level(Frontier.root(BATCH, token.device), token, value, None, 4, first=0, ran=0).picked
    assert picked.parent.tolist() == BATCH * [4 * [0]]
    assert all(int(chosen) in row for chosen, row in zip(picked.token[:, 0], token[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 9, 63])
def test_the_same_nodes_are_the_best(monkeypatch, shape, width):
    monkeypatch.setenv(SWITCH, "torch")
    candidates, _, _ = grown(shape, shape.depth, alike=False)
    limits = torch.tensor([width, 3, 0]), torch.tensor([shape.depth, 2, 1]), width, shape.depth
    expected = best_nodes(torch.tensor([7, 8, 9]), candidates, *limits)
    monkeypatch.setenv(SWITCH, "triton")
    with counted() as launches:
        actual = best_nodes(torch.tensor([7, 8, 9]), candidates, *limits)
    assert launches.total == 1
    for name, field, same in zip(expected._fields, actual, expected, strict=True):
        assert field.dtype is same.dtype
        assert torch.equal(field, same), name
    tree = checked_tree(*(expected.token, expected.parent, expected.length))
    inside = tree.inside
    assert torch.equal(tree.depth[inside], expected.depth[inside])
    assert torch.equal(tree.ancestors[inside], expected.ancestors[inside])
