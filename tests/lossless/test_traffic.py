"""What is recorded of served requests is what the target computes of them, whatever else the engine does meanwhile."""

from __future__ import annotations

import pytest
import torch

from infer.learning.recording import recording
from infer.learning.traffic import TOP_K, TrafficRecorder
from infer.request import SamplingParams
from tests.lossless.plain import LONG_GREEDY as GREEDY
from tests.lossless.plain import LONG_SAMPLED as SAMPLED
from tests.lossless.plain import answer_all, ids
from train.data.sequences import Sequences
from train.features.online import compute_features

PROMPTS = [[7, 8, 9] * 4, list(range(20, 60)), [5] * 33, list(range(30, 40)), [*range(20, 60), 3]]


def examples_of(engine, requests, wants=lambda request: True):
    recorder, examples = TrafficRecorder(engine.head.config.aux_layers, wants), []
    step = engine.step

    def step_and_take():
        outputs = step()
        examples.extend(recorder.ended())
        return outputs

    engine.step = step_and_take
    with recording(engine, recorder):
        responses = answer_all(engine, requests, arrivals=[0, 0, 1, 4, 30])
    engine.step = step
    assert not recorder._running
    return responses, examples


@pytest.mark.parametrize("pool", [144, 4096])
def test_examples_are_what_was_served(make_small_engine, pool):
    """Of requests that are drafted for, pre-empted, and begin on pages that another one filled."""
    requests = [(prompt, (GREEDY, SAMPLED)[n % 2]) for n, prompt in enumerate(PROMPTS)]
    plain = make_small_engine(torch.float32, "none", None, threads=1)
    expected = [ids(plain.generate([prompt], params))[0] for prompt, params in requests]
    engine = make_small_engine(
        torch.float32, "head", {"tree": "beam:3x4:10"}, head="eagle3", threads=1, max_batch=3, page_size=8,
        max_tokens_in_cache=pool,
    )  # fmt: skip
    responses, examples = examples_of(engine, requests)
    assert [response.token_ids for response in responses] == expected
    assert (engine.stats.preemptions > 0) == (pool < 4096)
    assert engine.stats.speculation.accepted
    layers, texts = engine.head.config.aux_layers, {}
    for (prompt, params), tokens in zip(requests, expected, strict=True):
        texts[tuple(prompt + tokens)] = len(prompt), params
    assert len(examples) == len(requests)
    assert pool < 4096 or any(example.first for example in examples)
    for example in examples:
        text = next(text for text in texts if list(text[example.first :]) == example.ids.tolist())
        length, params = texts[text]
        assert (example.prompt, example.temperature) == (length - example.first, params.temperature)
        batch = Sequences.of([(list(text), [False] * len(text))]).batch([0])
        fresh = compute_features(plain.target, batch, layers)
        states = torch.stack(fresh.aux, 2)[0, example.first :]
        torch.testing.assert_close(example.states[:-1], states[:-1], rtol=1e-4, atol=1e-4)
        log_probs, decided = example.top_log_probs, slice(example.prompt - 1, -1)
        assert log_probs.shape == (len(example.ids), TOP_K)
        assert (log_probs[: example.prompt - 1] == -torch.inf).all()
        logits = plain.target.logits(fresh.hidden[0])[example.first :].log_softmax(-1)
        wanted = logits.gather(1, example.top_ids.long())[decided]
        torch.testing.assert_close(log_probs[decided].float(), wanted, rtol=0, atol=1e-2)
        assert torch.equal(example.top_ids[decided, 0].long(), logits[decided].argmax(-1))


def test_what_is_not_wanted_and_what_has_no_end_is_no_example(make_small_engine):
    engine = make_small_engine(torch.float32, "head", None, head="eagle3", threads=1)
    wanted = SamplingParams(max_tokens=9, ignore_eos=True)
    other = SamplingParams(max_tokens=9, ignore_eos=True, cache_salt="another tenant")
    requests = [([5, 6, 7], wanted), ([5, 6, 8], other), ([5, 6, 9], SamplingParams(max_tokens=1))]
    _, examples = examples_of(engine, requests, lambda request: request.params.cache_salt == "")
    assert [example.ids[:3].tolist() for example in examples] == [[5, 6, 7]]
    recorder = TrafficRecorder(engine.head.config.aux_layers, lambda request: True)
    with recording(engine, recorder):
        name = engine.add([5, 6, 7], wanted)
        for _ in range(2):
            engine.step()
        engine.abort(name)
        assert list(recorder.ended()) == []
    assert not recorder._running
