"""Sampling: greedy ties, the distribution of sampled choices, noise that depends on (seed, position, id) alone."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.choose import choice_keys, choose, choose_best, logprobs, restrict
from kernels.cpu.library import library
from kernels.noise import gumbel_noise
from kernels.operands import NO_LIMITS, ChoiceParameters
from tests.distributions import Z, chi_square_excess, sampling_probs
from tests.kernels.gemma_rows import float64_keys, gemma_rows, ranked


def parameters(rows, temperature=1.0, top_k=0, top_p=1.0, seeds=None, min_p=0.0):
    seeds = torch.arange(rows) if seeds is None else seeds
    return ChoiceParameters(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        seeds & 0xFFFFFFFF,
        seeds >> 32,
    )


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert choose(logits, None, torch.zeros(2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.5, 0, 0.6, 0.0),
        (1.0, 5, 0.8, 0.0),
        (1.5, 6, 0.9, 0.1),
    ],
)
def test_sampled_choices_follow_the_processed_distribution(temperature, top_k, top_p, min_p):
    rows, logits = 40_000, torch.tensor([2.0, 1.5, 0.3, 0.0, -1.0, -1.2, 0.9, -3.0])
    expected = sampling_probs(logits, temperature, top_k, top_p, min_p)
    for positions, seeds in (
        (torch.full((rows,), 17), torch.arange(rows) * 7919 + 2**40),  # many seeds at one position
        (torch.arange(rows), torch.full((rows,), 12345)),  # one seed along a text
    ):
        sampling = parameters(rows, temperature, top_k, top_p, seeds, min_p)
        counts = torch.bincount(choose(logits.expand(rows, -1), sampling, positions), minlength=len(logits))
        assert chi_square_excess(counts, expected) < Z


def test_consecutive_positions_are_independent():
    rows = 40_000
    seed = torch.full((rows,), 3)
    noise = gumbel_noise(seed, torch.zeros_like(seed), torch.arange(rows), torch.arange(4))
    bits = (noise.argmax(-1) >= 2).double() - 0.5
    for lag in (1, 2, 16):
        assert abs((bits[lag:] * bits[:-lag]).mean() * 4) < 5 / math.sqrt(rows)


def test_noise_has_the_moments_of_a_gumbel():
    noise = gumbel_noise(torch.arange(64), torch.arange(64), torch.arange(64), torch.arange(4096)).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(64)).abs().max() < 0.1


def test_noise_depends_on_seed_position_and_id_alone():
    ids = torch.arange(1000)
    batch = gumbel_noise(torch.arange(9), torch.arange(9), torch.arange(9) + 100, ids)
    single = gumbel_noise(torch.tensor([4]), torch.tensor([4]), torch.tensor([104]), ids)
    assert torch.equal(batch[4], single[0])
    subset = torch.tensor([3, 999, 17])
    subset_noise = gumbel_noise(torch.tensor([4]), torch.tensor([4]), torch.tensor([104]), subset)
    assert torch.equal(subset_noise[0], single[0, subset])
    for numbers in ((5, 4, 104), (4, 5, 104), (4, 4, 105)):
        changed = gumbel_noise(*(torch.tensor([number]) for number in numbers), ids)
        assert (changed == single).double().mean() < 0.01


def test_greedy_and_sampled_rows_mix():
    logits = torch.randn(6, 50)
    mixed = parameters(6)
    mixed.temperature[::2] = 0
    chosen = choose(logits, mixed, torch.arange(6))
    assert torch.equal(chosen[::2], logits[::2].argmax(-1))
    assert torch.equal(chosen[1::2], choose(logits, parameters(6), torch.arange(6))[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [None, torch.arange(64) * 3 + 1])
def test_the_form_in_c_chooses_what_the_rule_written_out_does(dtype, ids):
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(200, 80, generator=generator)).to(dtype)[:, :64]  # a slice of wider rows
    logits[::3, 5:60] = -torch.inf  # as a grammar mask leaves them
    logits[1::3] = logits[1::3].round()  # ties
    mixed = parameters(200, 0.7, seeds=torch.arange(200) * 2**31 + 7)
    mixed.temperature[::4], mixed.limits = 0, NO_LIMITS
    positions = torch.arange(200) * 1000
    assert library() is not None
    tokens = torch.arange(64) if ids is None else ids  # by column
    for sampling in (mixed, None):
        keys = choice_keys(logits, sampling, positions, ids).float()
        best, values = choose_best(logits, sampling, positions, ids, 1)
        assert torch.equal(choose(logits, sampling, positions, ids), tokens[keys.argmax(-1)])
        assert torch.equal(best[:, 0], tokens[keys.argmax(-1)])
        torch.testing.assert_close(values[:, 0], keys.log_softmax(-1).amax(-1), atol=1e-5, rtol=1e-5)
        for count in (2, 15, 64):
            best, values = choose_best(logits, sampling, positions, ids, count)
            columns = keys.sort(dim=-1, descending=True, stable=True).indices[:, :count]  # ties by lowest column
            assert torch.equal(best, tokens[columns])
            torch.testing.assert_close(values, keys.log_softmax(-1).gather(1, columns), atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("spread", [0.0, 0.03, 1.0, 30.0, 3e4])
def test_what_the_form_in_c_passes_over_could_not_have_been_chosen(spread):
    """With equal logits noise alone decides: the largest of a million values, whose last bits are coarse."""
    rows, size = 24, 2**16
    logits = spread * torch.randn(rows, size, generator=torch.Generator().manual_seed(2))
    sampling = parameters(rows, 0.9, seeds=torch.arange(rows) * 2**33 + 5)
    sampling.limits = NO_LIMITS
    positions, ids = torch.arange(rows) * 77, torch.randperm(size)[: size // 2]
    assert torch.equal(choose(logits, sampling, positions), choice_keys(logits, sampling, positions).argmax(-1))
    half = logits[:, : size // 2]
    columns = choice_keys(half, sampling, positions, ids).argmax(-1)
    assert torch.equal(choose(half, sampling, positions, ids), ids[columns])


def test_a_row_is_chosen_alike_in_any_batch():
    logits, p = torch.randn(9, 300), parameters(9, 0.9, 40, 0.95)
    together = choose(logits, p, torch.arange(9))
    for row in range(9):
        index = torch.tensor([row])
        assert choose(logits[row : row + 1], p.rows(index), index).item() == together[row]


def test_restrict_leaves_untouched_what_asks_for_nothing():
    logits = torch.randn(2, 10)
    out = restrict(logits, torch.tensor([0, 2]), torch.tensor([1.0, 1.0]), torch.zeros(2))
    assert torch.equal(out[0], logits[0])
    assert (out[1] > -torch.inf).sum() == 2


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest():
    probability = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3)
    off = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    out = restrict(probability.log(), *off, torch.tensor([0.0, 0.2, 1.0]))
    assert (out > -torch.inf).sum(1).tolist() == [4, 3, 1]
    both = restrict(probability.log(), torch.tensor([0, 2, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.full((3,), 0.2))
    assert (both > -torch.inf).sum(1).tolist() == [3, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_gemmas_size(dtype):
    logits, sampling, positions, ids = gemma_rows(dtype)
    keys = float64_keys(logits, sampling, positions, ids)
    plain = torch.tensor([0, 1, 2])  # rows without top-k and top-p, which the C kernel supports
    unrestricted = sampling.rows(plain)
    unrestricted.limits = NO_LIMITS
    best = ranked(keys[plain])[:, 0]
    assert torch.equal(choose(logits[plain], unrestricted, positions[plain], ids), ids[best])
    assert torch.equal(choose(logits, sampling, positions, ids), ids[ranked(keys)[:, 0]])
    tokens, log_p = choose_best(logits[plain], unrestricted, positions[plain], ids, 8)
    columns = ranked(keys[plain])[:, :8]
    assert torch.equal(tokens, ids[columns])
    torch.testing.assert_close(log_p.double(), keys[plain].log_softmax(-1).gather(1, columns), atol=1e-4, rtol=0)
    token_logprobs, rank, top, values = logprobs(logits, columns[0, :1].expand(len(logits)), 5)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(token_logprobs.double(), expected[:, columns[0, 0]], atol=1e-4, rtol=0)
    assert rank.tolist() == ((expected > expected[:, columns[0, :1]]).sum(1) + 1).tolist()
    torch.testing.assert_close(values.double(), expected.gather(1, top), atol=1e-4, rtol=0)
