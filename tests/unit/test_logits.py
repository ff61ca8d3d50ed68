"""Penalties, bias and masks against a direct implementation of their definitions, row by row and down a tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.batch.params import SamplingParams
from infer.request import Request
from infer.sampling.choose import choose_rows, drafted_paths, row_parameters
from infer.sampling.logits_processors import count_tokens, shape_rows
from tests.drafts import checked_tree

V = 12
PROMPT, OUTPUT = [1, 2, 3, 2], [4, 5, 4]


def shaped(params, paths, logits=None):
    logits = torch.linspace(-2, 2, V).repeat(len(paths), 1) if logits is None else logits
    request = Request("r", PROMPT, params, 0, PROMPT + OUTPUT[:1], frozenset((0, 9)))
    count_tokens(request, V, logits.device)
    request.tokens += OUTPUT[1:]
    return shape_rows(request, logits, paths)


def reference(params, path, logits):
    output = OUTPUT + path
    row = logits.tolist()
    for token in range(V):
        if token in output or token in PROMPT:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in range(V):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        ending = PROMPT + output
        bad = any(w[-1] == token and ending[len(ending) - len(w) + 1 :] == list(w[:-1]) for w in params.bad_words)
        early = token in (0, 9) and len(output) < params.min_tokens
        if not allowed or bad or early:
            row[token] = -torch.inf
    return torch.tensor(row)


@settings(max_examples=80, deadline=None)
@given(
    presence=st.sampled_from([0.0, 0.7, -1.0]),
    frequency=st.sampled_from([0.0, 0.4]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3),
    allowed=st.none() | st.sets(st.integers(0, V - 1), min_size=1).map(tuple),
    words=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    path=st.lists(st.integers(0, V - 1), max_size=4),
)
def test_every_row_is_shaped_by_its_own_prefix(presence, frequency, repetition, bias, allowed, words, min_tokens, path):
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=tuple(map(tuple, words)),
        min_tokens=min_tokens,
    )
    paths = [path[:length] for length in range(len(path) + 1)] + [[7, 7]]  # a chain, and another branch
    logits = torch.randn(len(paths), V, generator=torch.Generator().manual_seed(len(path)))
    actual = shaped(params, paths, logits)
    for row, prefix in enumerate(paths):
        torch.testing.assert_close(actual[row], reference(params, prefix, logits[row]), rtol=1e-5, atol=1e-5)


def test_a_word_is_bad_only_after_its_beginning():
    params = SamplingParams(bad_words=((5, 4, 8), (3,), (4, 6, 7)))
    rows = shaped(params, [[], [6]])
    assert torch.isinf(rows[0]).nonzero().flatten().tolist() == [3, 8]
    assert torch.isinf(rows[1]).nonzero().flatten().tolist() == [
        3,
        7,
    ]  # the bad word starts in the output and ends in the draft


def test_paths_of_a_tree():
    tree = checked_tree(torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 1, 3]]), torch.tensor([5]))
    assert drafted_paths(tree, 0, 5) == [[], [1], [2], [1, 3], [1, 3, 4]]


def test_only_rows_that_ask_have_other_logits():
    """Logits keep their dtype beside a request with a bias, and the same token is sampled there as alone."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4)).bfloat16()
    plain = Request("plain", [1], SamplingParams(temperature=1.0, top_p=0.5), 7, [1])
    biased = Request("biased", [1], SamplingParams(temperature=1.0, logit_bias=((3, 100.0),)), 7, [1])
    positions = torch.arange(3)
    requests, ones = [plain, biased, plain], [1, 1, 1]
    parameters = row_parameters(requests, ones, logits.device)
    together = choose_rows(requests, ones, parameters, logits, positions)
    assert together.raw is logits
    assert list(together.processed) == [1]
    assert together.token[1] == 3
    assert together.warped_log_probs([1])[0].argmax() == 3
    for row in (0, 2):
        parameters = row_parameters([plain], [1], logits.device)
        alone = choose_rows([plain], [1], parameters, logits[row : row + 1], positions[row : row + 1])
        assert together.token[row] == alone.token[0]
        assert torch.equal(together.warped_log_probs([row]), alone.warped_log_probs([0]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", float("nan"), "temperature=nan"),
        ("temperature", -1.0, "temperature=-1"),
        ("min_p", 1.5, "min_p=1.5"),
        ("presence_penalty", 3.0, "presence_penalty=3"),
        ("frequency_penalty", float("inf"), "frequency_penalty=inf"),
        ("repetition_penalty", 0.0, "repetition_penalty=0"),
        ("logit_bias", {3: float("nan")}, r"logit_bias\[3\]=nan"),
        ("allowed_token_ids", (), "allowed_token_ids"),
        ("bad_words", ((),), "bad_words"),
        ("stop", ("",), "stop="),
        ("n", 0, "n=0"),
        ("min_tokens", 200, "min_tokens=200"),
        ("logprobs", 65, "logprobs=65"),
        ("prompt_logprobs", -1, "prompt_logprobs=-1"),
        ("logprobs_of", "both", "logprobs_of=both"),
        ("max_draft_tokens", 0, "speculate=false"),
        ("deadline_s", 0.0, "deadline_s=0"),
        ("acceptance", "mostly", "acceptance=mostly"),
    ],
)
def test_bad_values_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})
