"""Walks over a lattice in Triton's interpreter: the tokens and log-probabilities of the torch implementation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from kernels.choose import choose, choose_best
from kernels.operands import ChoiceParameters, Transition
from kernels.triton import SWITCH
from kernels.walk import make_lattice, rank_candidates, walk_chain
from tests.device import BF16, DEVICE, FP32, sized
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


LATTICES = sized([(3, 4, 90, 16)], [(1, 7, 32000, 64), (32, 15, 8000, 256)])  # chains, slots, tokens, rank


def lattice_case(batch, slots, size, rank, dtype):
    """Return a lattice of 8 candidates, a transition, the tokens before the blocks, and positions."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    positions = torch.arange(batch, device=DEVICE) + 100
    lattice = make_lattice(3 * normal(batch, slots, size), None, positions, torch.arange(size, device=DEVICE), 8)
    transition = Transition(normal(size, rank) * rank**-0.5, normal(size, rank), normal(batch, slots, rank))
    return lattice, transition, torch.arange(batch, device=DEVICE) % size, positions


def walked(lattice, transition, before):
    """Return tokens and log-probabilities of greedy chains, in float64 on the CPU."""
    column, token, logit = (part.cpu() for part in lattice)
    successor, predecessor, factor = (part.double().cpu() for part in transition)
    chosen, values, last = [], [], before.cpu()
    for slot in range(column.shape[1]):
        query = predecessor[last] * factor[:, slot]
        scores = logit[:, slot].double() + (successor[column[:, slot]] @ query[..., None]).squeeze(-1)
        best = scores.argmax(-1, keepdim=True)
        last = token[:, slot].gather(1, best)[:, 0]
        chosen.append(last)
        values.append(scores.log_softmax(-1).gather(1, best)[:, 0])
    return torch.stack(chosen, 1), torch.stack(values, 1)


@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("dtype", sized([FP32], [BF16, FP32]))
@pytest.mark.parametrize("sizes", LATTICES)
@torch.no_grad()
def test_a_walk_over_a_models_vocabulary(in_triton, compare, sizes, dtype):
    lattice, transition, before, positions = lattice_case(*sizes, dtype)
    tokens, values = walk_chain(lattice, transition, before, None, positions)
    case = "{} chains of {}, {} tokens, rank {}, ".format(*sizes) + str(dtype)
    true = cache(partial(walked, lattice, transition, before))
    if dtype == FP32:  # products of rounded factors may rank two candidates otherwise
        compare.same("walk", case, tokens, lambda: true()[0])
        compare.close("walk, log-probabilities", case, values, lambda: true()[1], 1e-4)
    else:
        agree = (tokens.cpu() == true()[0]).double().mean()
        compare.close("walk", f"share of tokens, {case}", agree, torch.ones(()), 0.05)
