"""Block verification and typical acceptance in Triton's interpreter decide as the torch implementation does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infer.batch.params import SamplingParams
from kernels import acceptance
from kernels.triton import SWITCH
from kernels.triton import acceptance as gpu
from tests.device import DEVICE, sized

V, BLOCK = 150, 64


def probs_of(rows, generator, spread=2.0):
    logits = torch.randn(rows, V, generator=generator) * spread
    logits[:, 3:60:7] = -torch.inf  # outside top-k
    return logits.softmax(-1)


def requests(counts, seed, *, kinds=("near", "far", "certain", "equal")):
    """Return the requests' target distributions, tokens, draft distributions (by alternating kind), seeds and roots."""
    generator = torch.Generator().manual_seed(seed)
    target_probs, tokens, drawn = [], [], []
    for b, count in enumerate(counts):
        kind = kinds[(b + seed) % len(kinds)]
        probs = probs_of(count + 1, generator)
        near = probs[:-1] if kind == "equal" else (0.8 * probs[:-1] + 0.2 * probs_of(count, generator))
        draft = probs_of(count, generator) if kind == "far" else near
        draft_tokens = draft.multinomial(1, generator=generator)[:, 0] if count else torch.zeros(0)
        target_probs.append(probs)
        tokens.append([int(token) for token in draft_tokens])
        drawn.append(None if kind == "certain" else draft.to(DEVICE))
    seeds = [(seed * 7919 + b) << 20 | 2**62 for b in range(len(counts))]
    return torch.cat(target_probs).to(DEVICE), tokens, drawn, seeds, [b + 1000 * seed for b in range(len(counts))]


def test_block_verification_decides_alike():
    decided = set()

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 10_000))
    @example([6, 6, 6, 6], 0)  # accepts 6, 0, 1 and 6: every kind of decision, whatever hypothesis draws
    def check(counts, seed):
        target_probs, tokens, drawn, seeds, roots = requests(counts, seed)
        parts = target_probs.cpu().split([count + 1 for count in counts])
        expected = [
            acceptance.verify_block(*request) for request in zip(parts, drawn, tokens, seeds, roots, strict=True)
        ]
        assert gpu.block(target_probs, tokens, drawn, seeds, roots, block=BLOCK) == expected
        decided.update((accepted, count) for (accepted, _), count in zip(expected, counts, strict=True))

    check()
    assert any(0 < accepted < count for accepted, count in decided)
    assert any(accepted == count > 1 for accepted, count in decided)


def test_where_nothing_is_left_the_target_is_drawn_from():
    """No coin refuses a token of equal probability; but a weight of one and equal probability at the cut exist."""
    target = torch.zeros(2, V)
    target[:, 5], target[:, 9] = 0.5, 0.5
    draft = target[:1] * 4  # no distribution: the only way to reject a token with no residual
    for seed in range(6):
        expected = acceptance.verify_block(target, draft, [5], seed, 3)
        assert gpu.block(target.to(DEVICE), [[5]], [draft.to(DEVICE)], [seed], [3], block=BLOCK) == [expected]
        assert expected[1] in (5, 9)


def test_dispatch_and_typical_acceptance(monkeypatch):
    probs, tokens, drawn, seeds, roots = requests([3, 0, 5, 2], 1)
    above = torch.tensor([0, 1, 2, 5, 6, 9], device=DEVICE)
    columns = torch.cat([probs[above[:3]].argmax(-1), torch.tensor([0, 1, 4], device=DEVICE)])
    limits = [torch.full((len(above),), limit, dtype=torch.float64, device=DEVICE) for limit in (0.3, 0.09)]
    outputs = []
    for switch in ("torch", "triton"):
        monkeypatch.setenv(SWITCH, switch)
        outputs.append(
            (
                acceptance.block(probs, tokens, drawn, seeds, roots),
                acceptance.typical_mask(probs, above, columns, *limits).tolist(),
            )
        )
    assert outputs[0] == outputs[1]
    assert 0 < sum(outputs[0][1]) < len(above)
    entropies = -torch.special.xlogy(probs.double(), probs.double()).sum(-1)
    assert (gpu.entropy(probs, block=BLOCK) - entropies).abs().max() < 1e-6
    assert (acceptance.entropy_of(probs) - entropies).abs().max() < 1e-6
    thresholds = (0.09 * torch.exp(-entropies[above])).clamp(max=0.3)
    assert outputs[0][1] == (probs[above, columns].double() > thresholds).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_coins_are_those_of_the_kernel(seed):
    """A token whose acceptance probability is just above the coin's value, and one just below."""
    value = acceptance.coin(seed, 7, 1)
    for factor, accepted in ((1.001, 1), (0.999, 0)):
        target, draft = torch.full((2, V), 1 / V), torch.full((1, V), 1 / V)
        target[0, 4] = min(1.0, value * factor) / V
        expected = acceptance.verify_block(target, draft, [4], seed, 7)
        assert gpu.block(target.to(DEVICE), [[4]], [draft.to(DEVICE)], [seed], [7], block=BLOCK) == [expected]
        assert expected[0] == accepted or value * factor > 1


CHAINS = sized((4, 3, 150), (32, 5, 128256))  # requests, drafted tokens, vocabulary


def chains():
    """Return target probabilities, tokens, draft probabilities, seeds and positions; every fourth chain has no draft
    probabilities (a deterministic draft).
    """
    batch, drafted, size = CHAINS
    generator = torch.Generator().manual_seed(batch)
    target_probs = (torch.randn(batch, drafted + 1, size, generator=generator) * 2).softmax(-1)
    others = (torch.randn(batch, drafted, size, generator=generator) * 2).softmax(-1)
    draft_probs = 0.7 * target_probs[:, :-1] + 0.3 * others
    tokens = draft_probs.flatten(0, 1).multinomial(1, generator=generator).view(batch, drafted).tolist()
    proposals = [None if b % 4 == 3 else probs for b, probs in enumerate(draft_probs.to(DEVICE))]
    seeds = [b * 7919 + (b << 33) for b in range(batch)]
    return target_probs.flatten(0, 1).to(DEVICE), tokens, proposals, seeds, [100 + b for b in range(batch)]


def typical(probs):
    """Return inputs of `typical_mask` with two tokens per row of `probs`, likely ones for every other row."""
    above = torch.arange(2 * len(probs), device=probs.device) // 2
    tokens = torch.where(above % 2 == 0, probs.argmax(-1)[above], above % probs.shape[1])
    limits = [torch.full_like(tokens, limit, dtype=torch.float64) for limit in SamplingParams().typical]
    return probs, above, tokens, *limits


@pytest.mark.gpu(seconds=8)
def test_chains_of_a_models_vocabulary(in_triton, compare):
    batch, drafted, size = CHAINS
    target_probs, tokens, draft_probs, *rest = chains()
    case = f"{batch} chains of {drafted}, vocabulary {size}"

    def true():
        parts = target_probs.cpu().split(drafted + 1)
        cpu_probs = [None if chain is None else chain.cpu() for chain in draft_probs]
        verified = zip(parts, cpu_probs, tokens, *rest, strict=True)
        return torch.tensor([acceptance.verify_block(*chain) for chain in verified])

    accepted = acceptance.block(target_probs, tokens, draft_probs, *rest)
    compare.same("block verification", case, torch.tensor(accepted), true)
    inputs = typical(target_probs)

    def likely():
        entropy, above, ids = acceptance.entropy_of(target_probs.cpu()), inputs[1].cpu(), inputs[2].cpu()
        threshold, alpha = SamplingParams().typical
        thresholds = (alpha * torch.exp(-entropy)).clamp(max=threshold)
        return target_probs.cpu()[above, ids].double() > thresholds[above]

    compare.same("typical acceptance", case, acceptance.typical_mask(*inputs), likely)
    compare.close(
        "entropies", case, gpu.entropy(target_probs), lambda: acceptance.entropy_of(target_probs.cpu()), 1e-12
    )
