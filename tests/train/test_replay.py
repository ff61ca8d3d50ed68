"""What a head was trained on before is mixed into what it learns from, and heads that forget it are not taken over."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import LearningConfig
from infer.engine import Engine
from infer.learning.messages import Message
from infer.options.cli import compose
from infer.request import Completion, SamplingParams
from models.heads.eagle3.head import Eagle3Head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.heads import memorise
from tests.train.conftest import STEPS, make_head
from tests.train.running import run
from tests.train.test_learning import SETTINGS, beside, fed, head, next_message, send_all, served, traffic, words  # noqa: F401
from train.config import LearnConfig
from train.data.sequences import Sequences
from train.evaluation import simulate
from train.features.online import compute_features
from train.learning import learner as learner_module
from train.learning import process as process_module
from train.learning.comparison import accepted, compared
from train.learning.examples import Example, batch_of
from train.learning.learner import NEARER, Learner, trainable_copy
from train.learning.process import learn
from train.learning.replay import Replay, open_replay

Served = tuple[list[Completion], list[SamplingParams]]


@pytest.fixture(scope="session")
def older(engine: Engine) -> Sequences:
    """Sampled responses to other prompts than those of the traffic, in sequences of two turns."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(1, 384, (8 + index % 5,), generator=generator).tolist() for index in range(12)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=36, ignore_eos=True)
    turns = Sequences.of_completions(engine.generate(prompts, params))
    pairs = [zip(turns.row(row), turns.row(row + 1), strict=True) for row in range(0, len(turns), 2)]
    joined = [tuple(map(torch.cat, pair)) for pair in pairs]
    return Sequences.joined([(ids, assistant) for ids, assistant in joined])


@pytest.fixture
def data(older: Sequences, responses: Sequences, tiny_target: LlamaTarget, tmp_path: Path) -> Path:
    return write_data(tmp_path / "run" / "data", older, responses, tiny_target.fingerprint)


def write_data(folder: Path, train: Sequences, held_out: Sequences, fingerprint: str) -> Path:
    folder.mkdir(parents=True)
    train.save(folder / "train.safetensors")
    held_out.save(folder / "held_out.safetensors")
    record = {"source": "here", "recipe": "0", "made_from": {"target": fingerprint}}
    (folder / "source.json").write_text(json.dumps(record))
    return folder


def settings_of(data: Path, **settings: Any) -> LearningConfig:
    values: dict[str, Any] = {**SETTINGS, "replay": str(data), **settings}
    return LearningConfig(**values)


def opened(data: Path, target: LlamaTarget, head: Eagle3Head, **settings: Any) -> Replay:  # noqa: F811
    config = settings_of(data, **settings)
    return open_replay(config, target.fingerprint, lambda: target, head.config.aux_layers, 1000)


@pytest.fixture
def make(data: Path, tiny_target: LlamaTarget) -> Callable[..., Learner]:
    def make(used: Eagle3Head, **settings: Any) -> Learner:
        replay = opened(data, tiny_target, used, **settings)
        return Learner(settings_of(data, **settings), used, STEPS, 1000, replay)

    return make


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_batch_has_its_share(share: float, make: Callable[..., Learner], head: Eagle3Head,  # noqa: F811
    traffic: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811  # fmt: skip
    batches: list[Sequence[Example]] = []

    def batch(examples: Sequence[Example], *rest: Any) -> Any:
        batches.append(examples)
        return batch_of(examples, *rest)

    monkeypatch.setattr(learner_module, "batch_of", batch)
    learner = fed(make(head, replay_share=share), traffic)
    while learner.update_due:
        learner.update()
    ids = {tuple(example.ids.tolist()) for example in learner.trained.examples}
    tokens, replayed, piece = 0, 0, round(share * SETTINGS["batch_tokens"]) // 2
    for examples in batches:
        mixed = [len(example.ids) for example in examples if tuple(example.ids.tolist()) not in ids]
        assert 0 < sum(mixed) < len(examples) * piece
        tokens, replayed = tokens + sum(len(example.ids) for example in examples), replayed + sum(mixed)
        assert share * tokens <= replayed + 1e-6 < share * tokens + piece
    assert len(batches) == learner.updates > 20
    assert all(torch.isfinite(parameter).all() for parameter in learner.candidate.parameters())


def test_examples_are_what_the_target_computes_in_context(
    data: Path, older: Sequences, tiny_target: LlamaTarget, head: Eagle3Head  # noqa: F811
) -> None:  # fmt: skip
    """Also pieces, and the likeliest tokens as they are taken of what is served."""
    replay = opened(data, tiny_target, head, batch_tokens=256)
    rows = [older.row(index) for index in range(len(older))]
    pieces = replay.beside([example for example in replay.judged * 4])
    assert {example.first for example in pieces} == {0, 32, 64}
    for example in pieces:
        span = slice(example.first, example.first + len(example.ids))
        assert len(example.ids) <= 32
        (row,) = (index for index, (ids, _) in enumerate(rows) if torch.equal(ids[span], example.ids))
        assert torch.equal(example.assistant[1:], rows[row][1][span][1:])
        batch = older.batch([row])
        features = compute_features(tiny_target, batch, head.config.aux_layers)
        for place, layer in enumerate(features.aux):
            assert torch.equal(example.states[:, place], layer[0, span])
        log_probs = tiny_target.logits(features.hidden[0, span]).float().log_softmax(-1)
        assert example.top_ids.shape == (len(example.ids), 32)
        assert torch.equal(example.top_ids[:, 0].long(), log_probs.argmax(-1))
        torch.testing.assert_close(
            example.top_log_probs.float(), log_probs.gather(1, example.top_ids.long()), atol=1e-2, rtol=1e-3
        )


def test_all_pieces_come_again_and_each_is_computed_once(
    data: Path, older: Sequences, tiny_target: LlamaTarget, head: Eagle3Head  # noqa: F811
) -> None:  # fmt: skip
    replay, computed = opened(data, tiny_target, head), []
    compute = replay._example
    replay._example = lambda *row: computed.append(row) or compute(*row)  # type: ignore[method-assign]
    drawn = [example for _ in range(30) for example in replay.beside(replay.judged)]
    assert len(computed) == len(older) + len(replay.judged)
    rounds = {tuple(example.ids.tolist()): 0 for example in drawn}
    for example in drawn:
        rounds[tuple(example.ids.tolist())] += 1
    assert min(rounds.values()) > 3
    assert max(rounds.values()) - min(rounds.values()) <= 1


def test_a_sample_is_as_large_as_memory_holds(data: Path, older: Sequences, tiny_target: LlamaTarget,
    head: Eagle3Head) -> None:  # noqa: F811  # fmt: skip
    few = opened(data, tiny_target, head, buffer_tokens=1000)
    all_of = opened(data, tiny_target, head)
    tokens = int(few._trained.offsets[-1])
    assert 1000 / 3 - int(older.lengths.max()) < tokens <= 1000 / 3
    assert int(few._held_back.offsets[-1]) <= 1000 / 3 * 3 / 7
    assert len(all_of._trained) == len(older)
    with pytest.raises(ValueError, match="learning.replay: no sequence of it fits into memory; raise learning.most_mb"):
        opened(data, tiny_target, head, buffer_tokens=600, replay_share=0.1)


@pytest.fixture
def remembering(make: Callable[..., Learner], traffic: list[Message], responses: Sequences,  # noqa: F811
    engine: Engine, tiny_target: LlamaTarget) -> Learner:  # fmt: skip
    """A learner whose head drafts well what the replay holds back."""
    used = memorise(make_head(tiny_target, responses, vocab=384), engine.target, responses, STEPS)
    return fed(make(used), traffic)


def test_a_head_that_forgets_is_not_taken_over(
    remembering: Learner, served: Served, responses: Sequences, engine: Engine, tiny_target: LlamaTarget  # noqa: F811
) -> None:  # fmt: skip
    """Of two heads that gain on what is served, the one that still drafts well what the first was trained on."""
    learner, used = remembering, remembering.used
    new = Sequences.of_completions(served[0][:16])
    both = Sequences.joined([parts.row(row) for parts in (new, *[responses] * 2) for row in range(len(parts))])
    forgetful, mindful = (memorise(trainable_copy(used), engine.target, sequences, STEPS) for sequences in (new, both))
    before = {name: value.clone() for name, value in used.state_dict().items()}

    learner.candidate.load_state_dict(forgetful.state_dict())
    first = learner.compare()
    assert first.after > first.before + first.error
    assert first.replay is not None
    assert first.replay[1] < 0.99 * first.replay[0]
    assert not first.better
    assert learner.tau == first.before
    for state in (learner.used.state_dict(), learner.candidate.state_dict()):  # it begins anew
        assert all(torch.equal(value, before[name]) for name, value in state.items())

    learner.candidate.load_state_dict(mindful.state_dict())
    second = learner.compare()
    assert second.replay is not None
    assert second.replay[1] >= 0.99 * second.replay[0]
    assert second.better
    assert learner.tau == second.after
    assert all(torch.equal(value, mindful.state_dict()[name]) for name, value in learner.used.state_dict().items())

    weak = make_head(tiny_target, responses, vocab=384)
    learner.used.load_state_dict(weak.state_dict())
    learner.candidate.load_state_dict(mindful.state_dict())
    third = learner.compare()
    assert third.better
    assert third.replay == second.replay, "what is lost is counted from the first head on, not from the last"

    batch = responses.batch(range(len(responses)))
    features = compute_features(tiny_target, batch, used.config.aux_layers)
    assert second.replay[1] == pytest.approx(simulate(mindful, batch, features, STEPS).acceptance_length)


def test_a_head_that_forgets_is_sent_nearer_to_the_first(
    remembering: Learner, served: Served, engine: Engine  # noqa: F811
) -> None:  # fmt: skip
    """With no more of the first head's weights than it takes, and training goes on from the head's own."""
    learner, used = remembering, remembering.used
    new = Sequences.of_completions(served[0][:16])
    forgetful = memorise(trainable_copy(used), engine.target, new, STEPS, rounds=20)
    learner.candidate.load_state_dict(forgetful.state_dict())
    assert learner.replay is not None
    shares = {share: learner.nearer(share) for share in NEARER}
    kept = {
        share: compared(*(accepted(each, learner.replay.judged, STEPS) for each in (used, nearer)))
        for share, nearer in shares.items()
    }
    comparison = learner.compare()
    assert comparison.better
    assert comparison.replay == kept[0.75][:2]
    assert [share for share in NEARER if kept[share].after < 0.99 * kept[share].before] == [0.0, 0.25, 0.5]
    for name, value in learner.used.named_parameters():
        first, last = (each.get_parameter(name) for each in (learner._first, forgetful))
        torch.testing.assert_close(value, 0.75 * first + 0.25 * last)
    assert all(
        torch.equal(value, forgetful.state_dict()[name]) for name, value in learner.candidate.state_dict().items()
    )


def test_a_candidate_says_what_it_keeps(
    words: list[str], data: Path, traffic: list[Message], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """The whole target is loaded once, when an update needs it, in the precision of the server."""
    loaded: list[dict[str, Any]] = []

    def load(path: str, **how: Any) -> LlamaTarget:
        loaded.append(how)
        return load_target(path, **how)

    monkeypatch.setattr(process_module, "load_target", load)
    config = compose("learn", LearnConfig, [*words, f"learning.replay={data}", "model.dtype=bfloat16"])
    with beside(lambda stream: learn(config, stream)) as stream:
        next_message(stream, "status")
        assert loaded == [{"revision": None, "layers": ()}]
        halves = [m._replace(tensors={**m.tensors, "states": m.tensors["states"].bfloat16()}) for m in traffic]
        send_all(stream, halves)
        candidate = next_message(stream, "candidate")
    assert loaded[1:] == [{"revision": None, "dtype": torch.bfloat16}]
    before, after = (float(candidate.facts[f"replay_{when}"]) for when in ("before", "after"))
    assert before >= 1
    assert after >= 0.99 * before


def test_the_data_of_a_run_are_replayed(settings: list[str], head: Eagle3Head, tiny_target: LlamaTarget,  # noqa: F811
    tmp_path: Path) -> None:  # fmt: skip
    """As training writes them."""
    run(settings, "run=first", "steps=1")
    replay = opened(tmp_path / "first" / "data", tiny_target, head)
    assert len(replay.judged) == 4
    assert all(example.assistant.any() for example in replay.beside(replay.judged))


def test_data_of_something_else_are_refused(words: list[str], data: Path, tmp_path: Path) -> None:  # noqa: F811
    def refused(data: Path, message: str) -> None:
        config = compose("learn", LearnConfig, [*words, f"learning.replay={data}"])
        with socket.socket() as stream, pytest.raises(ValueError, match=message):
            learn(config, stream)

    refused(tmp_path / "none", r"learning.replay=.*none: .*none holds no train.safetensors; give outputs/<run>/data")
    record = json.loads((data / "source.json").read_text())
    (data / "source.json").write_text(json.dumps({**record, "made_from": {"target": "0f"}}))
    refused(data, r"learning.replay=.*data: was made with another target \(fingerprint 0f, this one has \w+\); give")


def test_a_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replay_share=0.25: leaves 12 of learning.batch_tokens=16 .* and 4 to the"):
        LearningConfig(replay="outputs/run/data", batch_tokens=16)
    assert LearningConfig(batch_tokens=16).traffic_tokens == 16
