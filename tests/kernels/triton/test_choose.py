"""Sampling in Triton's interpreter has the bits of the torch implementation, with several blocks per row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from kernels.choose import choice_keys, choose, choose_best, logprobs, restrict
from kernels.fixed_point import FRACTION_BITS, exp_weights
from kernels.noise import exact_log, gumbel_noise, gumbel_of, noise_words, row_keys
from kernels.operands import NO_LIMITS, ChoiceParameters, Limits, Shaping
from kernels.shape import packed, shape, shape_in_torch
from kernels.triton import choose as gpu
from tests.device import BF16, DEVICE, FP32, served, sized
from tests.kernels import test_nan_logits
from tests.kernels.gemma_rows import SIZE, float64_keys, gemma_rows, ranked
from tests.operations import counted

V, BLOCK = 150, 64
POSITIONS = torch.arange(6) + 1000
ROWS = [  # temperature, top_k, top_p, min_p
    (0.0, 3, 0.5, 0.1),  # greedy: the other parameters are ignored
    (1.0, 0, 0.9, 0.0),
    (0.7, 5, 1.0, 0.02),
    (1.3, 20, 0.8, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.0, 500, 1.0, 0.0),  # more than the vocabulary
]


def rows_of(rows):
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    seeds = torch.arange(len(rows)) * 7919 + 2**40 + 3
    return ChoiceParameters(temperature, top_k, top_p, min_p, seeds & 0xFFFFFFFF, seeds >> 32)


def logits_of(count, dtype=torch.float32):
    x = torch.randn(count, V, generator=torch.Generator().manual_seed(1)) * 3
    x[min(2, count - 1), 40:90] = 1.5  # ties across blocks
    x[0, [7, 140]] = 30.0
    x[count - 1, 3:60] = -torch.inf  # masked
    return x.to(dtype)


def expected(logits, parameters, token_ids=None):
    keys = choice_keys(logits, parameters, POSITIONS[: len(logits)], token_ids).float()
    ordered = keys.sort(dim=-1, descending=True, stable=True)
    return ordered.values, ordered.indices, keys.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_chooses_what_torch_chooses(dtype):
    logits, parameters = logits_of(6, dtype), rows_of(ROWS)
    log_probs, columns, log_mass = gpu.best(logits, parameters, POSITIONS, None, 4, mass=True, block=BLOCK)
    keys, same_columns, _ = gpu.best(logits, parameters, POSITIONS, None, 4, block=BLOCK)
    values, indices, total = expected(logits, parameters)
    assert torch.equal(keys, values[:, :4])
    assert torch.equal(columns, indices[:, :4])
    assert torch.equal(same_columns, columns)
    assert torch.equal(log_probs, keys - log_mass[:, None])
    torch.testing.assert_close(log_mass, total)


def test_thresholds_are_those_of_restrict():
    logits, p = logits_of(6), rows_of(ROWS)
    allowed = restrict(logits[1:] / p.temperature[1:, None], p.top_k[1:], p.top_p[1:], p.min_p[1:]) > -torch.inf
    thresholds = gpu.find_thresholds(logits, p, BLOCK)
    assert thresholds[0] == -torch.inf
    scaled = logits[1:] / p.temperature[1:, None]
    assert torch.equal((scaled >= thresholds[1:, None]) & (scaled > -torch.inf), allowed)


EACH = list(itertools.product((False, True), repeat=3))[1:]


@pytest.mark.parametrize(
    ("limits", "dtype"),
    [*((limits, torch.float32) for limits in EACH), *((EACH[-1], dtype) for dtype in (torch.bfloat16, torch.float16))],
)
def test_only_the_limits_that_rows_may_use_are_searched(dtype, limits):
    """Rows with every combination of two values of the limits; each parameter serves two rows."""
    used = Limits(*limits)
    rows = [(t, k * used.top_k, p if used.top_p else 1.0, m * used.min_p)
            for t in (0.0, 0.6) for k in (0, 7) for p in (1.0, 0.8) for m in (0.0, 0.05)]  # fmt: skip
    rows = list(dict.fromkeys(rows))  # a limit that is not used has one value
    parameters = replace(rows_of(rows), limits=used).repeated(2)
    logits = torch.randn(2 * len(rows), V, generator=torch.Generator().manual_seed(3)) * 4
    logits[::3, ::5] = -torch.inf
    logits[1::3, :9] = -0.0
    logits = logits.to(dtype)
    with counted() as launches:
        thresholds = gpu.find_thresholds(logits, parameters, BLOCK)
    passes = {torch.float32: 8, torch.bfloat16: 4, torch.float16: 5}[dtype]
    searches = used.top_k + used.top_p
    assert launches.names["count_digits"] == searches * passes
    assert launches.total == 1 + searches * passes + max(searches, 1)
    scaled = logits.float() / parameters.by_row().temperature.clamp(min=1e-30)[:, None]
    p = parameters.by_row()
    expected = restrict(scaled, p.top_k, p.top_p, p.min_p) > -torch.inf
    for row in range(len(logits)):
        if p.temperature[row] > 0:
            assert torch.equal((scaled[row] >= thresholds[row]) & (scaled[row] > -torch.inf), expected[row])
        else:
            assert thresholds[row] == -torch.inf


def test_greedy_rows_are_not_read():
    """In a graph for all requests their search costs the launches alone."""
    logits, peaks = logits_of(2), torch.full((2, -(-V // BLOCK)), 7.0)
    gpu.peak_of_block[peaks.shape](logits, logits.stride(0), V, 1, torch.tensor([0.0, 0.5]), peaks, N=BLOCK)
    assert torch.equal(peaks[0], torch.full_like(peaks[0], 7.0))
    assert torch.equal(peaks[1].max(), logits[1].float().max())


def test_top_p_is_the_same_for_every_order_of_summing():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, V, generator=generator) * 2
    top_p = torch.rand(6, generator=generator)
    top_p[:2] = torch.tensor([0.0, 1 - 2**-24])
    rows = [(1.0, 0, share, 0.0) for share in top_p.tolist()]
    kept = restrict(logits, *(getattr(rows_of(rows), name) for name in ("top_k", "top_p", "min_p"))) > -torch.inf
    for order, block in ((torch.arange(V), 128), (torch.randperm(V, generator=generator), 64)):
        thresholds = gpu.find_thresholds(logits[:, order].contiguous(), rows_of(rows), block)
        assert torch.equal(logits >= thresholds[:, None], kept)


def test_greedy_rows_and_draft_vocabularies():
    logits = logits_of(3)
    keys, columns, _ = gpu.best(logits, None, POSITIONS, None, 2, block=BLOCK)
    assert columns[0].tolist() == [7, 140]  # a tie goes to the lowest id
    assert torch.equal(keys, expected(logits, None)[0][:, :2])
    ids = torch.arange(V) * 13 + 5  # token ids of the target
    parameters = rows_of(ROWS[4:] * 2).rows(torch.arange(3))
    parameters.limits = NO_LIMITS
    _, tokens, _ = gpu.best(logits, parameters, POSITIONS, ids, 3, block=BLOCK)
    plain = ChoiceParameters(*(getattr(parameters, name) for name in ("temperature", "top_k", "top_p", "min_p")),
                             parameters.seed_low, parameters.seed_high)  # fmt: skip
    plain.top_k = plain.top_k * 0
    assert torch.equal(tokens, ids[expected(logits, plain, ids)[1][:, :3]])


def test_a_row_hangs_on_itself_alone():
    logits, parameters = logits_of(6), rows_of(ROWS)
    together = gpu.best(logits, parameters, POSITIONS, None, 1, mass=True, block=BLOCK)
    for row in (3, 5):
        index = torch.tensor([row])
        alone = gpu.best(
            logits[index], parameters.rows(index), POSITIONS[index], None, 1, mass=True, block=BLOCK
        )  # fmt: skip
        for batch, part in zip(together, alone, strict=True):
            assert torch.equal(batch[row : row + 1], part)


def test_the_switch_sends_rows_through_triton(monkeypatch):
    logits, parameters = logits_of(6), rows_of(ROWS)
    logits[0, 7] += 1  # torch.topk breaks ties arbitrarily
    tokens = torch.tensor([7, 1, 2, 3, 4, 100])
    outputs = {}
    for switch in ("torch", "triton"):
        monkeypatch.setenv("HEADWAY_KERNELS", switch)
        outputs[switch] = (
            choose(logits, parameters, POSITIONS),
            *choose_best(logits, parameters, POSITIONS, None, 3),
            *logprobs(logits, tokens, 5),
        )
    for actual, reference in zip(outputs["triton"], outputs["torch"], strict=True):
        torch.testing.assert_close(actual, reference)


def test_the_noise_has_the_same_bits_in_c_and_in_torch(monkeypatch):
    seeds = torch.tensor([0, 2**32 - 1, 12345])
    ids = torch.cat([torch.arange(1000), torch.tensor([2**31, 2**32 - 1])])  # not a multiple of the vector width
    random_words = noise_words(row_keys(seeds, seeds.flip(0), seeds + 9), ids)
    assert torch.equal(gumbel_noise(seeds, seeds.flip(0), seeds + 9, ids), gumbel_of(random_words))


def test_the_logarithm_is_one():
    x = torch.cat([torch.logspace(-37, 38, 20000), torch.linspace(0.5, 2, 20001)])
    actual, true = exact_log(x).double(), x.double().log()
    assert ((actual - true).abs() <= 3e-7 * true.abs() + 1e-9).all()
    ends = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    u = ((ends.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    torch.testing.assert_close(gumbel_of(ends).double(), -torch.log(-torch.log1p(-u)), rtol=1e-6, atol=1e-6)


def test_the_exponential_is_one():
    x = -torch.cat([torch.zeros(1), torch.logspace(-9, 1.46, 20001), torch.tensor([30.0, 1e30, torch.inf])])
    weights = exp_weights(x)
    assert weights[0] == 2**FRACTION_BITS
    assert weights[-3:].tolist() == [0, 0, 0]
    assert bool((weights[1:] <= weights[:-1]).all())
    assert ((weights.double() - x.double().exp() * 2**FRACTION_BITS).abs() <= 2.0**-23 * weights + 1).all()


@pytest.mark.usefixtures("in_triton")
def test_a_vocabulary_of_gemmas_size():
    logits, sampling, positions, ids = gemma_rows(torch.bfloat16)
    keys = float64_keys(logits, sampling, positions, ids)
    single = sampling.rows(torch.tensor([2]))
    single.limits = NO_LIMITS
    tokens, log_p = choose_best(logits[2:3], single, positions[2:3], ids, 4)
    columns = ranked(keys[2:3])[:, :4]
    assert torch.equal(tokens, ids[columns])
    torch.testing.assert_close(log_p.double(), keys[2:3].log_softmax(-1).gather(1, columns), atol=1e-4, rtol=0)
    restricted = sampling.rows(torch.tensor([3, 4]))
    thresholds = gpu.find_thresholds(logits[3:], restricted, SIZE // 8)  # larger blocks, since the interpreter is slow
    scaled = logits[3:].float() / restricted.temperature[:, None]
    assert torch.equal(scaled >= thresholds[:, None], keys[3:] > -torch.inf)


LLAMA = 128256  # vocabulary of Llama-3.1-8B
CPU = torch.device("cpu")
SECONDS = 6e-7  # that the torch form takes on a CPU for one logit, in all kinds
KINDS = {  # of sampling: what differs from plain sampling
    "greedy": None,
    "sampled": {},
    "top-k and min-p": {"top_k": 50, "min_p": 0.01},
    "top-p": {"top_p": 0.9},
}


def row_case(rows, size, dtype):
    """Return logits and positions."""
    generator = torch.Generator().manual_seed(rows * size)
    logits = (4 * torch.randn(rows, size, generator=generator)).to(dtype).to(DEVICE)
    return logits, torch.arange(rows, device=DEVICE) * 31 + 1000


def sampling_of(kind, rows, device=DEVICE):
    if KINDS[kind] is None:
        return None
    seeds = torch.arange(rows, device=device) * 7919 + 11
    values = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | KINDS[kind]
    values = {key: torch.full((rows,), value, device=device) for key, value in values.items()}
    limits = Limits() if KINDS[kind] else NO_LIMITS
    return ChoiceParameters(**values, seed_low=seeds, seed_high=seeds + 1, limits=limits, repeat=1)


def shaping_of(rows, size, device=DEVICE):
    """Return all logits processing that precedes the temperature, for the rows of a draft."""
    generator = torch.Generator().manual_seed(size)
    output = torch.randint(0, 3, (size,), generator=generator).float()
    prompt, allowed = torch.rand(size, generator=generator) < 0.1, torch.rand(rows, size, generator=generator) < 0.5
    drafted = torch.randint(-1, size, (rows, 4), generator=generator)
    bias = torch.randn(size, generator=generator)
    return Shaping(1.2, 0.3, -0.2, *(x.to(device) for x in (prompt, output, drafted, bias, packed(allowed))))


ROW_CASES = sized(
    [(2, 150, FP32), (3, 2300, BF16)],
    [
        *(served(rows, LLAMA, BF16, seconds=1 + rows * LLAMA * SECONDS) for rows in (1, 7, 64)),
        *((rows, size, BF16) for size in (32000, 2048, 262144) for rows in (1, 7, 64)),
        (16, LLAMA, FP32),
    ],
)


@pytest.mark.gpu(seconds=11)
@pytest.mark.parametrize(("rows", "size", "dtype"), ROW_CASES)
def test_rows_of_a_models_vocabulary(in_triton, compare, rows, size, dtype):
    """What is shaped, chosen and drafted is what the rule written out gives on a CPU."""
    logits, positions = row_case(rows, size, dtype)
    shape_case = f"{rows} x {size}, {dtype}"
    plain = shaping_of(rows, size, CPU)
    shaped = shape(logits, shaping_of(rows, size))
    compare.same("penalties, bias and mask", shape_case, shaped, lambda: shape_in_torch(logits.cpu(), plain))
    for kind in KINDS:
        case = f"{kind}, {shape_case}"

        @cache
        def keys(kind=kind):
            return choice_keys(logits.cpu(), sampling_of(kind, rows, CPU), positions.cpu())

        def best(keys=keys):
            values, columns = keys().double().sort(dim=-1, descending=True, stable=True)
            return values[:, :8] - keys().double().logsumexp(-1, keepdim=True), columns[:, :8]

        sampling = sampling_of(kind, rows)
        compare.same("choose", case, choose(logits, sampling, positions), lambda keys=keys: keys().argmax(-1))
        if kind != "top-p":
            columns, values = choose_best(logits, sampling, positions, None, 8)
            compare.same("draft top-m", case, columns, lambda best=best: best()[1])
            compare.close("draft top-m log-probabilities", case, values, lambda best=best: best()[0], 1e-5)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize("way", test_nan_logits.WAYS)
@torch.no_grad()
def test_logits_with_a_nan_have_no_choice(in_triton, way):
    test_nan_logits.check_choices(way, torch.float32)
    test_nan_logits.check_drafts(way)
