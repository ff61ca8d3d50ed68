"""Lossy acceptance rules: what each of them still guarantees, and that a response names the rule it used."""

from __future__ import annotations

import math

import pytest
import torch

from infer.batch.tree import DraftTree
from infer.request import SamplingParams
from kernels.acceptance import coin, draw, typical_mask, verify_block
from kernels.noise import DRAFTS, MASK32, gumbel_noise, stream
from kernels.verify import accept
from tests.distributions import Z, chi_square_excess
from tests.interpreted import scaled
from tests.pools import check_pool

TOKENS = scaled(30, 8)


def drawn_chain(draft, root_token, seed, root, length):
    """Sample a chain as a drafter does for block verification: with this step's noise for drafts."""
    tokens, token = [], root_token
    high = torch.tensor([(seed >> 32) ^ stream(DRAFTS, root)])
    for index in range(length):
        row = draft(token)
        noise = gumbel_noise(torch.tensor([seed & MASK32]), high, torch.tensor([root + index]), torch.arange(len(row)))
        token = int((row.log() + noise[0]).argmax())
        tokens.append(token)
    return tokens


def generate(target, draft, seed, count, *, certain=False, length=3):
    """Return the tokens after token 0 and how many each step emitted; distributions depend on the last token."""
    text, steps = [0], []
    while len(text) <= count:
        root = len(text) - 1
        tokens = [int(draft(text[-1]).argmax())] * 1 if certain else drawn_chain(draft, text[-1], seed, root, length)
        path = [text[-1], *tokens]
        target_probs = torch.stack([target(token) for token in path])
        draft_probs = None if certain else torch.stack([draft(token) for token in path[:-1]])
        accepted, bonus = verify_block(target_probs, draft_probs, tokens, seed, root)
        text += [*tokens[:accepted], bonus]
        steps.append(1 + accepted)
    return text[1 : count + 1], steps


@pytest.mark.parametrize(("temperature", "certain"), [(0.6, False), (1.0, False), (1.5, False), (1.0, True)])
def test_block_verification_follows_the_targets_law(temperature, certain):
    """Three tokens of a Markov chain: the distributions of single tokens and of pairs of consecutive tokens."""
    V, runs = 16, 3000
    generator = torch.Generator().manual_seed(int(temperature * 10))
    logits = torch.randn(V, V, generator=generator) * 1.5
    p = (logits / temperature).softmax(-1).double()
    q = ((logits + torch.randn(V, V, generator=generator)) / temperature).softmax(-1).double()
    pairs = [torch.zeros(V, V, dtype=torch.double) for _ in range(2)]
    for run in range(runs):
        text, _ = generate(lambda t: p[t], lambda t: q[t], seed=run * 7_919 + (run << 33), count=3, certain=certain)
        for place in range(2):
            pairs[place][text[place], text[place + 1]] += 1
    probs = p[0]
    for counts in pairs:
        joint = probs[:, None] * p
        assert chi_square_excess(counts.sum(1), probs) < Z
        assert chi_square_excess(counts.flatten(), joint.flatten()) < Z
        probs = probs @ p


@pytest.mark.parametrize(("V", "runs"), [(100, 1500), (8193, 600), (151936, 150)])
def test_block_verification_at_any_vocabulary(V, runs):
    generator = torch.Generator().manual_seed(V)
    p = (torch.randn(V, generator=generator) * 3).softmax(-1).double()
    q = (p.log() + torch.randn(V, generator=generator)).softmax(-1)
    counts = torch.zeros(V, dtype=torch.double)
    for run in range(runs):
        text, _ = generate(lambda t: p, lambda t: q, seed=run * 104_729 + (run << 35), count=2, length=2)
        for token in text:
            counts[token] += 1
    assert chi_square_excess(counts, p) < Z


def test_the_bound_notices_a_wrong_law():
    """Check the test itself: sampling from p instead of the residual after a rejection exceeds the bound."""
    V = 16
    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(V, generator=generator) * 1.5).softmax(-1).double()
    q = (p.log() + torch.randn(V, generator=generator)).softmax(-1)
    counts = torch.zeros(V, dtype=torch.double)
    for run in range(3000):
        tokens = drawn_chain(lambda t: q, 0, run * 7_919 + (run << 33), 0, 1)
        accepted = coin(run * 7_919, 0, 1) <= float(p[tokens[0]] / q[tokens[0]])
        counts[tokens[0] if accepted else draw(p, run * 7_919, 0)] += 1  # draws from p, not from the residual
    assert chi_square_excess(counts, p) > Z


def test_block_runs_are_longer_than_rejection_by_token():
    V = 16
    generator = torch.Generator().manual_seed(5)
    p = (torch.randn(V, V, generator=generator)).softmax(-1).double()
    q = (p.log() + 0.5 * torch.randn(V, V, generator=generator)).softmax(-1)
    block, by_token = [], []
    for run in range(400):
        seed = run * 7_919 + (run << 33)
        tokens = drawn_chain(lambda t: q[t], 0, seed, 0, 4)
        path = [0, *tokens]
        target_probs, draft_probs = p[torch.tensor(path)], q[torch.tensor(path[:-1])]
        block.append(1 + verify_block(target_probs, draft_probs, tokens, seed, 0)[0])
        run_length = 1
        for index, token in enumerate(tokens):
            if coin(seed, 0, index + 1) > float(target_probs[index, token] / draft_probs[index, token]):
                break
            run_length += 1
        by_token.append(run_length)
    assert sum(block) > sum(by_token)


def test_typical_acceptance_asks_less_where_the_target_is_uncertain():
    V = 50
    certain, uncertain = torch.full((V,), 0.02 / (V - 1)), torch.full((V,), 1 / V)
    certain[7] = 0.98
    probs = torch.stack([uncertain, certain, certain, certain])

    def last(probs, tokens, choice):
        """Return the last accepted node of a chain after token 0."""
        tree = DraftTree.chains([0], [tokens])
        limits = (torch.full((len(tokens),), limit, dtype=torch.float64) for limit in SamplingParams().typical)
        mask = typical_mask(probs, torch.arange(len(tokens)), torch.tensor(tokens), *limits)
        accepted = torch.tensor([[False, *mask.tolist()]])
        return int(accept(tree.nodes, torch.tensor([choice]), accepted))

    # any token is accepted after the uncertain root, then only the likely one
    assert last(probs, [3, 7, 9], [5, 7, 7, 7]) == 2
    assert last(probs, [3, 8, 7], [5, 7, 7, 7]) == 1
    # the token that the target chose is always accepted
    assert last(probs[1:], [9, 7], [9, 7, 4]) == 2


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_through_the_engine(make_engine, prompts, rule):
    engine = make_engine(proposer="head", drafts=4, max_batch=8)
    sampled = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=5, acceptance=rule)
    completions = engine.generate(prompts, sampled)
    assert all(completion.acceptance == rule for completion in completions)
    assert all(len(completion.token_ids) == TOKENS for completion in completions)
    assert sum(completion.stats.accepted for completion in completions) > 0
    again = engine.generate(prompts, sampled)
    assert [a.token_ids for a in again] == [c.token_ids for c in completions], "it can be repeated on one engine"
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True, acceptance=rule)
    plain = make_engine(proposer="none").generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    completions = engine.generate(prompts, greedy)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert all(completion.acceptance == "exact" for completion in completions)
    check_pool(engine._pool, [])


def test_beside_other_requests_nothing_changes(make_engine, prompts):
    """Exact requests keep their tokens, in chains and trees, beside lossy requests in the same batch."""
    exact = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=5)
    block = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=5, acceptance="block")
    expected = [c.token_ids for c in make_engine(proposer="none").generate(prompts, exact)]
    engine = make_engine(shape={"tree": "beam:3x4"}, max_batch=8)
    params = [block if index % 2 else exact for index in range(len(prompts))]
    completions = engine.generate(prompts, params)
    for index, completion in enumerate(completions):
        assert completion.acceptance == (params[index].acceptance or "exact")
        if index % 2 == 0:
            assert completion.token_ids == expected[index]


def test_block_verification_in_the_engine_follows_the_targets_law(make_engine, prompts):
    """Over many seeds the second and third token are distributed as with plain sampling, in a few cells of tokens."""
    runs, cells = scaled(1200, 96), 12
    engine = make_engine(proposer="head", drafts=3, max_batch=32)
    plain = make_engine(proposer="none", max_batch=32)
    counts = {}
    for name, source, rule in (("block", engine, "block"), ("plain", plain, "exact")):
        params = [
            SamplingParams(
                max_tokens=3,
                ignore_eos=True,
                temperature=1.0,
                seed=seed + (name == "plain") * 10_000_000,
                acceptance=rule,
            )
            for seed in range(runs)
        ]
        completions = source.generate([prompts[1]] * runs, params)
        counts[name] = torch.zeros(2, cells, dtype=torch.double)
        for completion in completions:
            for place in (1, 2):
                counts[name][place - 1, completion.token_ids[place] * cells // 384] += 1
    for place in range(2):
        pooled = counts["block"][place] + counts["plain"][place]
        statistic = float(((counts["block"][place] - counts["plain"][place]) ** 2 / pooled.clamp(min=1)).sum())
        assert (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1)) < Z


def test_synthetic_acceptance_has_the_given_rates(make_engine, prompts):
    engine = make_engine(proposer="synthetic", shape={"acceptance": [0.8, 0.5, 0.25]}, max_batch=8)
    params = SamplingParams(max_tokens=scaled(400, 40), ignore_eos=True, seed=3)
    completions = engine.generate([prompts[i] for i in (2, 5, 9)], params)
    assert all(completion.acceptance == "synthetic" for completion in completions)
    total = [sum(c.stats.accepted_by_position[d] for c in completions) for d in range(3)]
    drafted = [sum(c.stats.drafted_by_position[d] for c in completions) for d in range(3)]
    for depth, rate in enumerate((0.8, 0.4, 0.1)):
        spread = math.sqrt(rate * (1 - rate) / drafted[depth])
        assert abs(total[depth] / drafted[depth] - rate) < 4 * spread
    assert engine.generate([prompts[2]], params)[0].token_ids == completions[0].token_ids
