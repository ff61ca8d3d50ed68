"""A row of logits with a NaN has no choice, on every device and by every way of sampling; others have theirs."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.choose import choose, choose_best
from kernels.cpu.library import SWITCH, library
from kernels.operands import ChoiceParameters, Limits
from tests.device import DEVICE

WAYS = {
    "greedy": None,
    "sampled": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k and top-p": {"top_k": 5, "top_p": 0.8},
}
BROKEN = {0: [0], 2: [131], 3: [4, 90], 5: range(256)}  # columns that are NaN, by row


@pytest.fixture(params=["c", "torch"])
def kernels(request, monkeypatch):
    """tests/kernels/triton/test_choose.py runs the same tests in Triton."""
    library.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "torch")
    yield request.param
    library.cache_clear()


def sampling(way, rows):
    if way is None:
        return None
    p = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | way
    temperature, top_k, top_p, min_p = (torch.full((rows,), p[name], device=DEVICE) for name in p)
    temperature[rows - 1] = 0.0  # a greedy row among them
    seed, limits = torch.arange(rows, device=DEVICE), Limits(**{name: name in way for name in Limits._fields})
    return ChoiceParameters(temperature, top_k, top_p, min_p, seed, seed + 1, limits)


LIMITS = ("top_k", "top_p", "min_p")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_no_token_is_chosen_and_no_other_row_notices(kernels, way, dtype):
    check_choices(way, dtype)


def check_choices(way, dtype):
    logits = torch.randn(7, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    parameters, positions = sampling(WAYS[way], 7), torch.arange(7, device=DEVICE)
    whole = choose(logits, parameters, positions)
    for row, columns in BROKEN.items():
        logits[row, list(columns)] = math.nan
    expected = whole.index_fill(0, torch.tensor(list(BROKEN), device=DEVICE), -1)
    assert torch.equal(choose(logits, parameters, positions), expected)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@torch.no_grad()
def test_a_head_whose_logits_are_nan_drafts_tokens_of_its_vocabulary(kernels, way):
    check_drafts(way)


def check_drafts(way):
    """Distinct ones, where several are siblings in a tree; the target rejects them."""
    logits = torch.randn(7, 256, device=DEVICE)
    for row, columns in BROKEN.items():
        logits[row, list(columns)] = math.nan
    ids, positions = torch.arange(256, device=DEVICE) * 3 + 7, torch.arange(7, device=DEVICE)
    parameters = sampling(WAYS[way], 7)
    assert torch.isin(choose(logits, parameters, positions, ids), ids).all()
    tokens, _ = choose_best(logits, parameters, positions, ids, 4)
    assert torch.isin(tokens, ids).all()
    assert all(len(set(row)) == 4 for row in tokens.tolist())
