"""Walks over a lattice in Triton's interpreter: the tokens and log-probabilities of the torch implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.choose import ChoiceParameters, choose, choose_best
from kernels.triton import SWITCH
from kernels.walk import make_lattice, rank_candidates, walk_chain
from tests.kernels.test_walk import POSITIONS, make, parameters

BEFORE = torch.tensor([1, 2, 3])


def mixed() -> ChoiceParameters:
    """Greedy and sampled rows."""
    sampling = parameters(0.8)
    return replace(sampling, temperature=torch.tensor([0.8, 0.0, 1.3]))


@pytest.mark.parametrize("sampling", [None, mixed()])
@pytest.mark.parametrize(("count", "factor"), [(5, True), (16, False)])
def test_it_drafts_what_torch_does(in_triton, monkeypatch, count, factor, sampling):
    logits, ids, transition = make(torch.float32, factor=factor)
    logits, ids = logits[..., :100], ids[:100]
    query = transition.query(2, torch.tensor([[7, 8], [9, 10], [11, 12]]))

    def drafted():
        lattice = make_lattice(logits, sampling, POSITIONS, ids, count)
        chain = walk_chain(lattice, transition, BEFORE, sampling, POSITIONS)
        return *lattice, *chain, *rank_candidates(lattice, 2, transition, query, sampling, POSITIONS + 2, 4)

    computed = drafted()
    monkeypatch.setenv(SWITCH, "torch")
    for one, other in zip(computed, drafted(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_each_row_may_have_ids_of_its_own(in_triton, monkeypatch):
    generator, sampling = torch.Generator().manual_seed(2), mixed()
    logits = torch.randn(3, 20, generator=generator)
    ids = torch.stack([torch.randperm(500, generator=generator)[:20].sort().values for _ in range(3)])

    def chosen():
        return choose(logits, sampling, POSITIONS, ids), *choose_best(logits, sampling, POSITIONS, ids, 3)

    computed = chosen()
    monkeypatch.setenv(SWITCH, "torch")
    for one, other in zip(computed, chosen(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
