"""Walks over a lattice: the candidates of a slot, and their choice after a token, in C and in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import walk
from kernels.choose import choice_keys, choose, choose_best
from kernels.cpu.library import library
from kernels.operands import ALL_LIMITS, NO_LIMITS, ChoiceParameters, Lattice, Transition
from kernels.walk import make_lattice, rank_candidates, walk_chain
from tests.pairwise import parametrize_pairs

BATCH, SLOTS, SIZE, TOKENS, RANK = 3, 6, 400, 1200, 32
POSITIONS = torch.tensor([5, 60, 700])


def parameters(temperature: float) -> ChoiceParameters:
    seeds = torch.arange(BATCH) + 2**33
    off = torch.zeros(BATCH)
    return ChoiceParameters(
        off + temperature, off.long(), off + 1, off, seeds & 0xFFFFFFFF, seeds >> 32, limits=NO_LIMITS
    )


def make(dtype: torch.dtype, *, factor: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Transition]:
    """Return logits, the draft vocabulary and a transition."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    factors = normal(BATCH, SLOTS, RANK) if factor else None
    return (
        3 * normal(BATCH, SLOTS, SIZE),
        3 * torch.arange(SIZE),
        Transition(normal(SIZE, RANK), normal(TOKENS, RANK), factors),
    )


def written_out(
    lattice: Lattice, transition: Transition, before: int, sampling: ChoiceParameters | None, row: int, slot: int
) -> torch.Tensor:
    """Return the log-probability of each candidate of one slot after a token."""
    assert transition.predecessor is not None
    query = transition.predecessor[before]
    if transition.factor is not None:
        query = query * transition.factor[row, slot]
    rows = transition.successor[lattice.column[row, slot]].float()
    logits = (lattice.logit[row, slot] + rows @ query.float())[None]
    sampling = sampling and sampling.rows(torch.tensor([row]))
    keys = choice_keys(logits, sampling, POSITIONS[row : row + 1] + slot, lattice.token[row, slot])
    return keys[0].log_softmax(-1)


@pytest.fixture(params=["C", "torch"])
def form(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(walk, "fused_walk", lambda *parts: None)
    else:
        assert library() is not None


@parametrize_pairs(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "count": [5, 16, 48, 64],
        "factor": [False, True],
        "temperature": [None, 0.8],
    }
)
def test_a_chain_takes_the_best_candidate_after_the_one_before(form, dtype, count, factor, temperature):
    sampling = None if temperature is None else parameters(temperature)
    logits, ids, transition = make(dtype, factor=factor)
    lattice = make_lattice(logits, sampling, POSITIONS, ids, count)
    keys = choice_keys(
        logits.flatten(0, 1),
        sampling and sampling.repeated(SLOTS),
        (POSITIONS[:, None] + torch.arange(SLOTS)).flatten(),
        ids,
    )
    best = keys.float().sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    assert torch.equal(lattice.column.flatten(0, 1), best)
    assert torch.equal(lattice.token, ids[lattice.column])
    assert torch.equal(lattice.logit, logits.float().gather(2, lattice.column))
    tokens, values = walk_chain(lattice, transition, torch.tensor([1, 2, 3]), sampling, POSITIONS)
    for row in range(BATCH):
        before = row + 1
        for slot in range(SLOTS):
            expected = written_out(lattice, transition, before, sampling, row, slot)
            before = int(tokens[row, slot])
            assert before == int(lattice.token[row, slot, expected.argmax()])
            torch.testing.assert_close(values[row, slot], expected.max(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_node_of_a_level_ranks_the_candidates(form, dtype, temperature):
    sampling = None if temperature is None else parameters(temperature)
    logits, ids, transition = make(dtype, factor=True)
    lattice = make_lattice(logits, sampling, POSITIONS, ids, 24)
    before = torch.tensor([[7, 8], [9, 10], [11, 12]])
    tokens, values = rank_candidates(lattice, 2, transition, transition.query(2, before), sampling, POSITIONS + 2, 5)
    for row in range(BATCH):
        for node in range(2):
            expected = written_out(lattice, transition, int(before[row, node]), sampling, row, 2).topk(5)
            assert torch.equal(tokens[row, node], lattice.token[row, 2, expected.indices])
            torch.testing.assert_close(values[row, node], expected.values, atol=1e-4, rtol=1e-4)
    everything = rank_candidates(lattice, 2, transition, transition.query(2, before), sampling, POSITIONS + 2, 99)
    assert everything[0].shape == (BATCH, 2, 24)  # no more candidates than there are


def test_with_all_candidates_it_is_the_choice_over_the_vocabulary(form):
    logits, ids, transition = make(torch.float32, factor=False)
    logits, ids = logits[..., :40], ids[:40]
    transition = transition._replace(successor=transition.successor[:40])
    sampling = parameters(1.0)
    lattice = make_lattice(logits, sampling, POSITIONS, ids, 64)
    before = torch.tensor([1, 2, 3])
    tokens, _ = walk_chain(lattice, transition, before, sampling, POSITIONS)
    corrected = logits[:, 0] + transition.query(0, before[:, None])[:, 0] @ transition.successor.T
    assert torch.equal(tokens[:, 0], choose(corrected, sampling, POSITIONS, ids))


def test_ties_go_to_the_lowest_token(form):
    ids = torch.arange(SIZE)
    flat = Transition(torch.zeros(SIZE, RANK), torch.zeros(TOKENS, RANK))
    lattice = make_lattice(torch.ones(BATCH, SLOTS, SIZE), None, POSITIONS, ids, 16)
    assert lattice.column[0, 0].tolist() == list(range(16))
    assert not walk_chain(lattice, flat, ids[:BATCH], None, POSITIONS)[0].any()


def test_limits_apply_to_corrected_candidates():
    """Top-k of one is the greedy choice, though the noise favours another token; candidates are not limited by it."""
    logits, ids, transition = make(torch.float32, factor=False)
    limited = replace(parameters(1.5), top_k=torch.ones(BATCH, dtype=torch.int64), limits=ALL_LIMITS)
    before = torch.tensor([1, 2, 3])
    lattice = make_lattice(logits, limited, POSITIONS, ids, 64)
    assert torch.equal(lattice.column, make_lattice(logits, parameters(1.5), POSITIONS, ids, 64).column)
    tokens, _ = walk_chain(lattice, transition, before, limited, POSITIONS)
    assert torch.equal(tokens, walk_chain(lattice, transition, before, None, POSITIONS)[0])
    assert not torch.equal(tokens, walk_chain(lattice, transition, before, parameters(1.5), POSITIONS)[0])


def test_each_row_may_have_ids_of_its_own():
    generator = torch.Generator().manual_seed(2)
    logits, sampling = torch.randn(BATCH, 32, generator=generator), parameters(1.0)
    sampling.temperature[1] = 0.0
    ids = torch.stack([torch.randperm(500, generator=generator)[:32].sort().values for _ in range(BATCH)])
    chosen, ranked = choose(logits, sampling, POSITIONS, ids), choose_best(logits, sampling, POSITIONS, ids, 4)
    for row in range(BATCH):
        one, at = sampling.rows(torch.tensor([row])), POSITIONS[row : row + 1]
        assert chosen[row] == choose(logits[row : row + 1], one, at, ids[row])
        alone = choose_best(logits[row : row + 1], one, at, ids[row], 4)
        assert torch.equal(ranked[0][row], alone[0][0])
        torch.testing.assert_close(ranked[1][row], alone[1][0], atol=1e-5, rtol=1e-5)
