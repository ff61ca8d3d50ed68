"""Requests that the engine refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import pytest

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.heads.config import HeadConfig
from models.heads.draft_model.head import DraftModelHead
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
        ([-1], {}, "prompt=-1: must be token ids"),
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


def test_no_more_than_asked_for_are_in_the_engine_together(engine):
    prompts = [[5, 6, 7, number] for number in range(7)]
    params = [SamplingParams(max_tokens=2 + number) for number in range(6)] + [SamplingParams(max_tokens=3, n=2)]
    together = []

    def count(index, output):
        together.append(engine.stats.running + engine.stats.waiting)

    alone = engine.generate(prompts, params)
    held_back = engine.generate(prompts, params, max_concurrency=2, on_output=count)
    assert [completion.token_ids for completion in held_back] == [completion.token_ids for completion in alone]
    assert len(held_back) == 8
    assert max(together) <= 3  # the last prompt has two completions


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
    assert loaded.proposer_name == "suffix"
    with pytest.raises(ValueError, match=r"train/run\.py"):
        Engine.load(model, HeadConfig(name="eagle3"), None, ProposerConfig(name="head"))


def test_an_exported_head_is_taken_by_default(tiny_target_folder, tiny_head_folder):
    model = ModelConfig(name="tiny", path=str(tiny_target_folder))
    engine = Engine.load(model, HeadConfig(name="eagle3", path=str(tiny_head_folder)))
    assert engine.proposer_name == "head"


def test_a_deadline_ends_what_runs_and_what_waits(tiny_target_folder):
    now = [100.0]
    config = EngineConfig(max_tokens_in_cache=256, max_batch=1)
    engine = Engine(load_target(str(tiny_target_folder)), proposer="ngram", config=config, clock=lambda: now[0])
    late = SamplingParams(max_tokens=100, ignore_eos=True, deadline_s=2.0)
    engine.add([1, 2, 3], late, request_id="runs")
    engine.add([1, 2, 3], late, request_id="waits")
    engine.add([4, 5], SamplingParams(max_tokens=2, ignore_eos=True), request_id="other")
    seen: dict[str, list] = {"runs": [], "waits": [], "other": []}
    for _ in range(3):
        for output in engine.step():
            seen[output.request_id].append(output)
    assert sum(len(output.token_ids) for output in seen["runs"]) >= 3
    now[0] += 2.5
    while engine.has_work:
        for output in engine.step():
            seen[output.request_id].append(output)
    assert [seen[name][-1].finish_reason for name in seen] == ["deadline", "deadline", "length"]
    assert seen["waits"][-1].token_ids == []
    assert engine.stats.kv_usage == 0


def test_tokens_that_come_after_the_deadline_are_not_emitted(tiny_target_folder):
    """The deadline passes while the step runs."""
    times = iter([0.0] * 4 + [9.0] * 20)  # one reading in `add`, three in the first step, then past the deadline
    engine = Engine(load_target(str(tiny_target_folder)), proposer="none", clock=lambda: next(times))
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, deadline_s=1.0, ignore_eos=True), request_id="a")
    (first,) = engine.step()
    assert len(first.token_ids) == 1
    (last,) = engine.step()
    assert (last.token_ids, last.finish_reason) == ([], "deadline")


def test_higher_priority_is_served_first(tiny_target_folder):
    config = EngineConfig(max_batch=1)
    engine = Engine(load_target(str(tiny_target_folder)), proposer="none", config=config)
    for name, priority in (("low", -1), ("normal", 0), ("high", 5), ("normal too", 0)):
        engine.add([1, 2], SamplingParams(max_tokens=2, priority=priority, ignore_eos=True), request_id=name)
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["high", "normal", "normal too", "low"]


def test_what_a_request_asks_for_must_be_there(engine):
    with pytest.raises(ValueError, match=r"proposer=head: this engine has .*ngram"):
        engine.add([1], SamplingParams(proposer="head"))
    with pytest.raises(ValueError, match=r"n=2: add\(\) queues one"):
        engine.add([1], SamplingParams(n=2))
    with pytest.raises(ValueError, match="stop: this engine has no tokenizer"):
        engine.add([1], SamplingParams(stop=("a",)))
    for field in ({"logit_bias": {5000: 1.0}}, {"allowed_token_ids": (5000,)}, {"bad_words": ((1, 5000),)}):
        with pytest.raises(ValueError, match="token id 5000"):
            engine.add([1], SamplingParams(**field))
    assert not engine.has_work


@pytest.mark.parametrize("tree", ["none", "beam:3x4"])
def test_a_draft_model_with_a_short_context_stops_drafting_and_the_request_goes_on(
    tiny_target_folder, make_target_folder, tree
):
    folder, target = make_target_folder(seed=0, max_position_embeddings=32), load_target(str(tiny_target_folder))
    smaller = DraftModelHead.of(load_target(str(folder)), target.config.vocab_size)
    plain = Engine(load_target(str(tiny_target_folder)), proposer="none")
    engine = Engine(
        target, draft_model=smaller, proposer="draft_model", proposer_config=ProposerConfig("auto", tree=tree)
    )
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in ([3] * 10, [3] * 50):
        (completion,) = engine.generate([prompt], params)
        assert completion.token_ids == plain.generate([prompt], params)[0].token_ids
        assert (completion.stats.drafted > 0) == (len(prompt) < 32)
    together = engine.generate([[3] * 10, [3] * 50, [4] * 28], params)
    assert [c.token_ids for c in together[:2]] == [plain.generate([[3] * n], params)[0].token_ids for n in (10, 50)]
    assert engine.stats.proposer_failures == 0
