"""Early exits of drafts in Triton against the rule in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.early_exit import exit_level
from kernels.operands import SHARED, Drafting
from tests.device import DEVICE, sized

LEAST = 1e-6  # how far from 0 and 1 the probability of a token is taken to be


def exit_case(batch, depth):
    """Return chains, terms, depths and log-probabilities; every fifth chain is not scored."""
    generator = torch.Generator().manual_seed(batch)
    terms = torch.rand(batch, SHARED + 2 * depth, generator=generator)
    terms[:, 1:SHARED] *= 0.05  # prices
    terms[::5] = torch.tensor([0.0, 0.0, 0.0, 0.0, *[torch.inf] * (2 * depth)])
    depths = torch.randint(1, depth + 1, (batch,), generator=generator)
    log_probs = torch.rand(batch, generator=generator).log()
    return Drafting.begin(depths.to(DEVICE)), terms.to(DEVICE), depths.to(DEVICE), log_probs.to(DEVICE)


def exited(chains, terms, depths, log_probs, level):
    """Return the chains after the level, in float64 on the CPU."""
    active, length, chance = (part.cpu() for part in chains)
    wide, depth = terms.double().cpu(), (terms.shape[1] - SHARED) // 2
    slope, row, step, level_price = wide[:, :SHARED].T
    offset, following = wide[:, SHARED + level], wide[:, SHARED + depth + level]
    confidence = log_probs.double().cpu().exp().clamp(LEAST, 1 - LEAST).logit()
    chance = chance.double() * (offset + slope * confidence).sigmoid()
    keep = active if level == 0 else active & (chance >= row)
    gain = torch.where(keep, chance * following - row - step, 0.0).clamp(min=0.0)
    return Drafting((gain > 0) & (gain.sum() >= level_price) & (depths.cpu() > level + 1), length + keep, chance)


@pytest.mark.gpu(seconds=1)
def test_levels_end_as_the_rule_says(in_triton, compare):
    batch, depth = sized((7, 3), (64, 6))
    chains, terms, depths, log_probs = exit_case(batch, depth)
    for level in range(depth):
        case, true = f"{batch} chains, level {level}", exited(chains, terms, depths, log_probs, level)
        chains = exit_level(chains, terms, depths, log_probs, level, LEAST)
        compare.same("early exit, chains that go on", case, chains.active, true.active)
        compare.same("early exit, lengths", case, chains.length, true.length)
        compare.close("early exit, chances", case, chains.chance, true.chance, 1e-5)
