"""Block verification and typical acceptance in Triton's interpreter: what the torch form decides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import acceptance
from kernels.triton import SWITCH
from kernels.triton import acceptance as gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V, BLOCK = 150, 64


def laws_of(rows, generator, spread=2.0):
    logits = torch.randn(rows, V, generator=generator) * spread
    logits[:, 3:60:7] = -torch.inf  # outside top-k
    return logits.softmax(-1)


def requests(counts, seed, *, kinds=("near", "far", "certain", "equal")):
    """Of each request its laws, its tokens, and the laws they were drawn from, by kind in turn."""
    generator = torch.Generator().manual_seed(seed)
    laws, tokens, drawn = [], [], []
    for b, count in enumerate(counts):
        kind = kinds[(b + seed) % len(kinds)]
        own = laws_of(count + 1, generator)
        near = own[:-1] if kind == "equal" else (0.8 * own[:-1] + 0.2 * laws_of(count, generator))
        draft = laws_of(count, generator) if kind == "far" else near
        taken = draft.multinomial(1, generator=generator)[:, 0] if count else torch.zeros(0)
        laws.append(own)
        tokens.append([int(token) for token in taken])
        drawn.append(None if kind == "certain" else draft.to(DEVICE))
    seeds = [(seed * 7919 + b) << 20 | 2**62 for b in range(len(counts))]
    return torch.cat(laws).to(DEVICE), tokens, drawn, seeds, [b + 1000 * seed for b in range(len(counts))]


def test_block_verification_decides_alike():
    decided = set()

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 10_000))
    @example([6, 6, 6, 6], 0)  # keeps 6, 0, 1 and 6: every kind of decision, whatever else is drawn
    def check(counts, seed):
        laws, tokens, drawn, seeds, roots = requests(counts, seed)
        parts = laws.cpu().split([count + 1 for count in counts])
        expected = [acceptance.block_of(*own) for own in zip(parts, drawn, tokens, seeds, roots, strict=True)]
        assert gpu.block(laws, tokens, drawn, seeds, roots, block=BLOCK) == expected
        decided.update((accepted, count) for (accepted, _), count in zip(expected, counts, strict=True))

    check()
    assert any(0 < accepted < count for accepted, count in decided)
    assert any(accepted == count > 1 for accepted, count in decided)


def test_where_nothing_is_left_the_target_is_drawn_from():
    """Coins that refuse a token of equal laws do not exist; a weight of one and equal laws at the cut do."""
    law = torch.zeros(2, V)
    law[:, 5], law[:, 9] = 0.5, 0.5
    draft = law[:1] * 4  # no law at all: only so is a token refused and nothing left
    for seed in range(6):
        expected = acceptance.block_of(law, draft, [5], seed, 3)
        assert gpu.block(law.to(DEVICE), [[5]], [draft.to(DEVICE)], [seed], [3], block=BLOCK) == [expected]
        assert expected[1] in (5, 9)


def test_dispatch_and_typical_acceptance(monkeypatch):
    laws, tokens, drawn, seeds, roots = requests([3, 0, 5, 2], 1)
    above = torch.tensor([0, 1, 2, 5, 6, 9], device=DEVICE)
    columns = torch.cat([laws[above[:3]].argmax(-1), torch.tensor([0, 1, 4], device=DEVICE)])
    answers = []
    for switch in ("torch", "triton"):
        monkeypatch.setenv(SWITCH, switch)
        answers.append(
            (acceptance.block(laws, tokens, drawn, seeds, roots), acceptance.likely(laws, above, columns).tolist())
        )
    assert answers[0] == answers[1]
    assert 0 < sum(answers[0][1]) < len(above)
    true = -torch.special.xlogy(laws.double(), laws.double()).sum(-1)
    assert (gpu.entropy(laws, block=BLOCK) - true).abs().max() < 1e-6
    assert (acceptance.entropy_of(laws) - true).abs().max() < 1e-6
    least = (0.09 * torch.exp(-true[above])).clamp(max=0.3)
    assert answers[0][1] == (laws[above, columns].double() > least).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_coins_are_those_of_the_kernel(seed):
    """One token that is as likely as a coin's own value, and one a little less."""
    value = acceptance.coin(seed, 7, 1)
    for factor, accepted in ((1.001, 1), (0.999, 0)):
        law, draft = torch.full((2, V), 1 / V), torch.full((1, V), 1 / V)
        law[0, 4] = min(1.0, value * factor) / V
        expected = acceptance.block_of(law, draft, [4], seed, 7)
        assert gpu.block(law.to(DEVICE), [[4]], [draft.to(DEVICE)], [seed], [7], block=BLOCK) == [expected]
        assert expected[0] == accepted or value * factor > 1
