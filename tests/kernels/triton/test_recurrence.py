"""Recurrent layers in Triton: their oracles, and equal bits of prompts, steps, trees and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.recurrent_rows import RecurrentRows
from tests.device import BF16, DEVICE, FP32, sized
from tests.kernels.recurrent_tokens import Tokens, equal, make_tokens, picked
from tests.kernels.reference.recurrence import path
from tests.pairwise import parametrize_pairs

BOUND = {FP32: 1e-5, BF16: 2e-2}
TREE = [-1, 0, 0, 2, 1, 1, 4, 0, 6, 3]
SIZES = sized(
    [
        {"channels": 40, "heads": 4, "groups": 2, "keys": 20, "values": 7},
        {"channels": 600, "heads": 1, "groups": 1, "keys": 64, "values": 18, "taps": 3, "silu": False, "bias": True},
    ],
    [
        {"channels": 6144, "heads": 32, "groups": 16, "keys": 128, "values": 128},
        {"channels": 2048, "heads": 32, "groups": 1, "keys": 256, "values": 64, "taps": 3, "silu": False, "bias": True},
        {"channels": 600, "heads": 3, "groups": 3, "keys": 20, "values": 24},
    ],
)


def make(count: int, dtype: torch.dtype, **options: Any) -> Tokens:
    return make_tokens(count, dtype, **options).to(DEVICE)


def tree_rows(trees: list[list[int]], slots: list[int], advance: list[bool]) -> RecurrentRows:
    parents = torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int32, device=DEVICE)
    at, certain = torch.tensor(slots, device=DEVICE), torch.tensor(advance, device=DEVICE)
    return RecurrentRows(tuple(map(len, trees)), at, certain, parents)


@pytest.mark.gpu
@parametrize_pairs({"size": SIZES, "delta": [True, False], "dtype": [FP32, BF16], "branching": [True, False]})
def test_it_is_its_formula(in_triton, compare, size, delta, dtype, branching):
    parents = TREE if branching else list(range(-1, 9))
    case = make(len(parents), dtype, delta=delta, **size)
    convolved, out, states = case.to(torch.device("cpu")).true(range(len(parents)), 2, parents)
    results = case.run(range(len(parents)), tree_rows([parents], [2], [not branching]))
    name = f"{size}, delta {delta}, {dtype}, {'tree' if branching else 'chain'}"
    compare.close("convolution of ancestors", name, results[0].cpu(), convolved, BOUND[dtype])
    compare.close("recurrence", name, results[1].cpu(), out, 1e-4)
    if not branching:
        compare.close("state", name, case.states[2].cpu(), states[-1], 1e-4)


@pytest.mark.gpu
@parametrize_pairs({"size": SIZES[:2], "delta": [True, False], "dtype": [FP32, BF16]})
def test_cuts_and_company_change_nothing(in_triton, size, delta, dtype):
    length = sized(7, 150)
    case = make(length + 3, dtype, delta=delta, **size)
    plain, others = case.copy(), [0, 1, 3, 5]
    outputs = plain.plain(range(length), 4)
    for cuts in sized([[7], [3, 1, 3]], [[150], [1, 149], [3, 147], [16, 134], [63, 87], [64, 86], [65, 85]]):
        part, taken, first = case.copy(), list[tuple[torch.Tensor, torch.Tensor]](), 0
        for cut in cuts:
            both = part.chains([[length, length + 1], range(first, first + cut), [length + 2]], [2, 4, 5])
            taken.append((both[0][2 : 2 + cut], both[1][2 : 2 + cut]))
            first += cut
        assert equal([torch.cat(each) for each in zip(*taken, strict=True)], outputs), cuts
        assert torch.equal(part.states[4], plain.states[4])
        assert torch.equal(part.windows[4], plain.windows[4])
    assert torch.equal(plain.states[others], case.states[others])
    assert torch.equal(plain.windows[others], case.windows[others])


@pytest.mark.gpu
@parametrize_pairs({"size": SIZES, "delta": [True, False], "dtype": [FP32, BF16]})
def test_a_node_has_the_bits_of_plain_decoding_along_its_path(in_triton, size, delta, dtype):
    """Beside a prompt that advances its state; then paths are replayed."""
    wide = [-1, *(max(0, node - 4) for node in range(1, sized(9, 65)))]
    count = len(wide)
    case = make(count + 3, dtype, delta=delta, **size)
    before, rows = case.copy(), tree_rows([TREE, [-1, 0, 1], wide, []], [2, 1, 2, 3], [False, True, False, False])
    tokens = [*range(len(TREE)), *range(count, count + 3), *range(count)]
    outputs = case.run(tokens, rows)
    assert torch.equal(case.states[[0, 2, 3, 4, 5]], before.states[[0, 2, 3, 4, 5]])
    assert torch.equal(case.windows[[0, 2, 3, 4, 5]], before.windows[[0, 2, 3, 4, 5]])
    for node in sized((5, 9), (0, 5, 8, 9)):
        taken, plain = path(TREE, node), before.copy()
        assert equal(plain.plain(taken, 2), picked(outputs, taken))
        index, committed = rows.along([taken, [], [], []])
        replayed = case.copy()
        replayed.run([tokens[row] for row in index], committed)
        assert torch.equal(replayed.states[2], plain.states[2])
        assert torch.equal(replayed.windows[2], plain.windows[2])
    last, at = path(wide, count - 1), len(TREE) + 3
    assert equal(before.copy().plain(last, 2), picked(outputs, [at + node for node in last]))
    assert equal(before.plain(range(count, count + 3), 1), picked(outputs, slice(len(TREE), at)))
    assert torch.equal(before.states[1], case.states[1])
    assert torch.equal(before.windows[1], case.windows[1])


@pytest.mark.gpu
@pytest.mark.parametrize("delta", [True, False])
def test_without_slots_it_begins_with_zeros_and_keeps_nothing(in_triton, delta):
    case = make(5, FP32, delta=delta, **SIZES[0])
    case.states[4] = 0
    case.windows[4] = 0
    without = case.copy()
    results = without.run(range(5), RecurrentRows.chains([2, 3], None, DEVICE))
    assert torch.equal(without.states, case.states)
    assert torch.equal(without.windows, case.windows)
    assert equal(case.copy().chains([[0, 1]], [4]), picked(results, slice(2)))
    assert equal(case.chains([[2, 3, 4]], [4]), picked(results, slice(2, 5)))
