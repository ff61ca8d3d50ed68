"""Acceptance in Triton's interpreter against its torch form, over random trees."""

from __future__ import annotations

import pytest
import torch

from infer.speculation.tree import MAX_NODES, DraftTree
from kernels.verify import accept


def random_trees(lengths, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=generator))

    width = max(lengths)
    token, parent = torch.zeros(len(lengths), width, dtype=torch.int64), torch.full((len(lengths), width), -1)
    for b, length in enumerate(lengths):
        taken = set()
        for node in range(1, length):
            above, word = (node - 1 if draw(3) else draw(node)), draw(2)
            while (above, word) in taken:
                word += 1  # siblings carry distinct tokens
            taken.add((above, word))
            token[b, node], parent[b, node] = word, above
    return DraftTree.from_parents(token, parent, torch.tensor(lengths)), generator


@pytest.mark.parametrize("lengths", [[1], [5, 1, 16, 9], [MAX_NODES, 33, 2], [MAX_NODES - 1] * 3])
@pytest.mark.parametrize("seed", range(4))
def test_accept_equals_the_torch_form(monkeypatch, lengths, seed):
    tree, generator = random_trees(lengths, seed)
    choice = torch.randint(0, 2, tree.token.shape, generator=generator)
    if seed == 0:  # a chain that is accepted whole, bit 63 of the word included
        tree = DraftTree.chains([0] * len(lengths), [[1] * (length - 1) for length in lengths])
        choice = torch.ones_like(tree.token)
    likely = torch.rand(tree.token.shape, generator=generator) < 0.3 if seed > 1 else None
    given = (tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, choice, likely)
    answers = []
    for switch in ("torch", "triton"):
        monkeypatch.setenv("HEADWAY_KERNELS", switch)
        answers.append(accept(*given))
    assert torch.equal(*answers)
    if seed == 0:
        assert answers[0].tolist() == [length - 1 for length in lengths]
