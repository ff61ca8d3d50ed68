"""What the engine refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import pytest

from infer.config import EngineConfig, HeadConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.targets import load_target


@pytest.fixture(scope="module")
def engine(tiny_target_folder):
    return Engine(load_target(str(tiny_target_folder)), proposer="ngram", config=EngineConfig(max_tokens_in_cache=256))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt: empty"),
        ([1] * 512, {}, r"512 tokens; the context is 512"),
        ([1, 384], {}, "token id 384"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": (999,)}, "token id 999"),
        ([1] * 200, {"max_tokens": 100}, "engine.max_tokens_in_cache"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
    ],
)
def test_sampling_params_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        SamplingParams(**{field: value})


def test_one_bad_prompt_of_many_runs_none(engine):
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[1, 2], []], SamplingParams(max_tokens=2))
    assert not engine.has_work
    with pytest.raises(ValueError, match="params: 1 for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate(["text"], SamplingParams())


def test_abort_frees_pages_and_ids_at_once(engine):
    engine.add([1] * 40, SamplingParams(max_tokens=50), request_id="a")
    with pytest.raises(ValueError, match="request_id=a"):
        engine.add([1], SamplingParams(), request_id="a")
    engine.step()
    assert engine.stats.kv_usage > 0
    assert engine.stats.running == 1
    with pytest.raises(ValueError, match="unfinished"):
        engine.set_proposer("none")
    engine.abort("a")
    engine.abort("a")
    assert engine.stats.kv_usage == 0
    assert not engine.has_work
    engine.add([1], SamplingParams(max_tokens=1), request_id="a")
    engine.abort("a")


def test_an_exception_in_a_callback_leaves_nothing_running(engine):
    def stop(index, output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=20), on_output=stop)
    assert not engine.has_work
    assert engine.stats.kv_usage == 0


def test_proposers(engine, tiny_target_folder):
    with pytest.raises(ValueError, match="no head was given"):
        engine.set_proposer("head")
    with pytest.raises(ValueError, match="proposer=nonsense"):
        engine.set_proposer("nonsense")
    model = ModelConfig(name="tiny", path=str(tiny_target_folder))
    loaded = Engine.load(model, HeadConfig(name="eagle3"), None, ProposerConfig(name="auto"))
    assert loaded.proposer_name == "ngram"
    with pytest.raises(ValueError, match=r"train/run\.py"):
        Engine.load(model, HeadConfig(name="eagle3"), None, ProposerConfig(name="head"))


def test_an_exported_head_is_taken_by_default(tiny_target_folder, tiny_head_folder):
    model = ModelConfig(name="tiny", path=str(tiny_target_folder))
    engine = Engine.load(model, HeadConfig(name="eagle3", path=str(tiny_head_folder)))
    assert engine.proposer_name == "head"
