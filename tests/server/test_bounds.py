"""Every extreme value of every request field that validation accepts can be sampled with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infer.batch.params import FLOATS, INTEGERS, LEAST_TEMPERATURE, MAX_INT, SamplingParams
from infer.request import Request
from infer.sampling.choose import choice_parameters
from infer.sampling.logits_processors import shape_rows
from infer.server.protocol.bodies import MAX_NESTING, parse
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.completions import CompletionRequest, GenerationRequest
from infer.server.protocol.errors import ApiError
from infer.server.protocol.messages import MessagesRequest
from infer.server.protocol.responses import ResponsesRequest
from kernels.choose import choose, warped_log_probs
from tests.server.test_extremes import EXTREMES, RAW

VOCABULARY = 384
BODIES: dict[type[GenerationRequest], dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"model": "m", "input": "x"},
    MessagesRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), 10**5000, -(10**5000), 2**63, "5", "", None, [], 1.5, True]


def request_of(params: SamplingParams) -> Request:
    seed = params.seed or 0  # drawn by the server if there is none
    return Request("r", [5, 6], params, seed, [5, 6], stop_ids=frozenset(params.stop_token_ids))


def compute(params: list[SamplingParams]) -> torch.Tensor:
    """Return the tokens sampled with each of `params`, all rows in one batch; log-probabilities must be finite."""
    requests = [request_of(item) for item in params]
    logits = torch.linspace(-65504, 65504, VOCABULARY).roll(100).repeat(len(requests), 1)
    shaped = torch.cat([shape_rows(item, row[None], [[]]) for item, row in zip(requests, logits, strict=True)])
    parameters = choice_parameters(requests, torch.device("cpu"))
    assert not bool(warped_log_probs(shaped, parameters).isnan().any())
    assert bool((warped_log_probs(shaped, parameters).amax(-1).isfinite()).all())
    return choose(shaped, parameters, torch.arange(len(requests)))


@pytest.mark.parametrize("kind", BODIES)
def test_what_the_wire_lets_through_can_be_computed_with(kind: type[GenerationRequest]) -> None:
    passed: dict[SamplingParams, tuple[str, Any]] = {}
    tried = 0
    for field in kind.model_fields:
        for value in EXTREMES:
            if isinstance(value, str) and value.startswith(RAW):
                continue
            tried += 1
            try:
                params = kind.model_validate(BODIES[kind] | {"seed": 1, field: value}).sampling_params(16)
            except (ValidationError, ValueError):
                continue
            if all(token < VOCABULARY for ids in params.token_ids.values() for token in ids):
                passed[params] = field, value
    assert tried > 1500
    assert len(passed) > 20
    tokens = compute(list(passed))
    assert bool(((tokens >= 0) & (tokens < VOCABULARY)).all())


def test_numbers_of_the_python_interface_are_bounded_by_name() -> None:
    messages: list[tuple[str, str]] = []
    for name, (minimum, maximum, _) in {**INTEGERS, **FLOATS}.items():
        for value in [*NO_NUMBERS, minimum - 1, maximum * 2 + 1]:
            try:
                params = SamplingParams(**{"max_tokens": MAX_INT, name: value})
            except ValueError as error:
                messages.append((name, str(error)))
            else:
                actual = getattr(params, name)
                assert actual is None or minimum <= actual <= maximum
                assert isinstance(actual, float | None if name in FLOATS else int | None)
    assert all(message.startswith(f"{name}=") and len(message) < 200 for name, message in messages)
    assert {name for name, _ in messages} == {*INTEGERS, *FLOATS}


def test_extremes_of_the_python_interface_can_be_computed_with() -> None:
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": MAX_INT, name: type(edge)(edge)})
        for name, (minimum, maximum, _) in {**INTEGERS, **FLOATS}.items()
        for edge in (minimum, maximum)
        if name not in ("top_p", "deadline_s", "max_tokens", "min_tokens", "n") or edge
    ]
    params += [SamplingParams(temperature=1.0, seed=1, top_p=1e-320, min_p=1e-320, repetition_penalty=1e-10)]
    params += [SamplingParams(temperature=1e-5, seed=1, repetition_penalty=1e10, logit_bias={5: 1e10, 6: -1e10})]
    compute(params)


def test_a_temperature_that_cannot_be_computed_with_is_greedy() -> None:
    for temperature in (1e-320, 1e-45, 1e-38, 1e-6, LEAST_TEMPERATURE * 0.999):
        assert SamplingParams(temperature=temperature) == SamplingParams()
    assert SamplingParams(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE


def test_what_fp32_cannot_hold_keeps_its_meaning() -> None:
    first = compute([SamplingParams(temperature=1.0, seed=seed, top_p=1e-320) for seed in range(20)])
    assert first.tolist() == compute([SamplingParams(seed=0)]).tolist() * 20  # only the most likely token
    assert SamplingParams(min_p=1e-40) == SamplingParams()


@pytest.mark.parametrize("name", ["top_k", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"])
def test_only_whole_numbers_are_token_ids(name: str) -> None:
    bad: dict[str, Any] = {"bad_words": ((1.5,),), "logit_bias": {1.5: 1.0}, "top_k": 1.5}
    with pytest.raises(ValueError, match=f"{name}=1.5: must be an integer"):
        SamplingParams(**{name: bad.get(name, (1.5,))})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": {"b": [1, NaN]}}', "a.b[1]"),
        (b'{"a": 1e999}', "a"),
        (b'{"a": [-Infinity]}', "a[0]"),
        (b'{"top_k": ' + b"9" * 5000 + b"}", "top_k"),
        (b'{"a": "[[", "tools": ' + b"[" * 200 + b"]" * 200 + b"}", "tools"),
        (b'{"a": ' + b'{"x":' * 200 + b"1" + b"}" * 200 + b"}", "a"),
        (b"[" * 200 + b"]" * 200, None),
        (b'"' + b'\\"' * 2**20 + b"[" * 200, None),  # in linear time
        (b'{"a": "\xff"}', None),
        (b"{", None),
    ],
)
def test_a_body_that_is_no_json_is_a_400_by_its_field(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_body_that_is_json_is_read_as_it_is() -> None:
    assert parse(b'{"a": [1, 1.5, -0.0, 1e-320, "\\ud800", null], "b": "[{[{"}') == {
        "a": [1, 1.5, -0.0, 1e-320, "\ud800", None],
        "b": "[{[{",
    }
    deepest = b"[" * MAX_NESTING + b"]" * MAX_NESTING
    assert isinstance(parse(deepest), list)
    assert parse(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001
