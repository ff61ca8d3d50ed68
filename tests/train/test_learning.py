"""A head learns from what is served: over a socket, from examples made of the engine's own responses."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import LearningConfig
from infer.engine import Engine
from infer.learning.messages import Message, receive, send
from infer.options.cli import compose
from infer.request import Completion, SamplingParams, SpeculationStats
from models.heads.base import Head
from models.heads.eagle3.head import Eagle3Head
from models.heads.files import load_head, save_head
from models.heads.measured_tree import rank_accuracy
from models.heads.weights import checkpoint_layout, checkpoint_tensors
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.weights import load_into
from tests import heads
from tests.train.conftest import STEPS, make_head
from tests.train.launching import ROOT
from train.config import LearnConfig
from train.data.sequences import Sequences
from train.evaluation import rank_accuracies
from train.features.online import compute_features
from train.learning import learner as learner_module
from train.learning.comparison import accepted, compared
from train.learning.examples import Buffer, Example, batch_of, is_held_back, last_tokens, read_example, rooms
from train.learning.learner import Learner
from train.learning.process import exchange, learn

SETTINGS: dict[str, Any] = {
    "buffer_tokens": 4000, "held_back": 0.3, "every_tokens": 1000, "passes": 8.0, "batch_tokens": 256, "lr": 5e-3,
    "nice": 5,
}  # fmt: skip
KINDS = 4  # of prompts


def messages_of(
    engine: Engine, completions: Sequence[Completion], params: Sequence[SamplingParams], head: Head
) -> Iterator[Message]:
    """Return what a server sends of these responses."""
    for number, (completion, sampling) in enumerate(zip(completions, params, strict=True)):
        batch = Sequences.of_completions([completion]).batch([0])
        layers = sorted(set(head.config.aux_layers))
        features = compute_features(engine.target, batch, layers)
        log_probs = engine.target.logits(features.hidden[0]).float().log_softmax(-1)
        top = log_probs.topk(8)
        values = top.values.half()
        values[: len(completion.prompt_ids) - 1] = -torch.inf
        tensors = {
            "ids": batch.ids[0],
            "states": torch.stack([layer[0] for layer in features.aux], dim=1),
            "top_ids": top.indices.int(),
            "top_log_probs": values,
        }
        facts = {"prompt": len(completion.prompt_ids), "temperature": sampling.temperature, "seed": sampling.seed}
        yield Message("example", tensors, {"number": str(number), **{key: str(fact) for key, fact in facts.items()}})


def answered(engine: Engine, seed: int) -> tuple[list[Completion], list[SamplingParams]]:
    """Return responses to a few kinds of prompts, over and over: half of them sampled, but not far from each other."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.randint(1, 384, (8,), generator=generator).tolist() for _ in range(KINDS)]
    prompts = [[1 + number // KINDS, *kinds[number % KINDS]] for number in range(80)]
    params = [
        SamplingParams(temperature=0.3 * (number % 2), seed=2**32 + number, max_tokens=32, ignore_eos=True)
        for number in range(len(prompts))
    ]
    return engine.generate(prompts, params), params


@pytest.fixture(scope="session")
def served(engine: Engine) -> tuple[list[Completion], list[SamplingParams]]:
    return answered(engine, seed=3)


@pytest.fixture(scope="session")
def traffic(engine: Engine, served: tuple[list[Completion], list[SamplingParams]], tiny_target: LlamaTarget,
            responses: Sequences) -> list[Message]:  # fmt: skip
    return list(messages_of(engine, *served, make_head(tiny_target, responses, vocab=384)))


@pytest.fixture
def head(tiny_target: LlamaTarget, responses: Sequences) -> Eagle3Head:
    return make_head(tiny_target, responses, vocab=384).requires_grad_(False)


def make_learner(head: Head, **settings: Any) -> Learner:
    return Learner(LearningConfig(**SETTINGS | settings), head, STEPS, 1000)


def examples_of(traffic: Sequence[Message], head: Head) -> list[Example]:
    return [read_example(message, head.config) for message in traffic]


def fed(learner: Learner, traffic: Sequence[Message]) -> Learner:
    for example in examples_of(traffic, learner.used):
        learner.add(example)
    return learner


@contextmanager
def beside(work: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Yield the server's end of a stream whose other end `work` has, in a thread; at the end wait until it returns."""
    ours, theirs = socket.socketpair()

    def closing() -> None:
        with theirs:
            work(theirs)

    thread = threading.Thread(target=closing)
    with ours:
        thread.start()
        try:
            yield ours
        finally:
            ours.shutdown(socket.SHUT_WR)
            while receive(ours):  # it may wait for room to send
                pass
            thread.join()


def exchanging(learner: Learner, pause_above: int = 0) -> AbstractContextManager[socket.socket]:
    return beside(lambda stream: exchange(learner, stream, pause_above, None))


def load(running: int) -> Message:
    return Message("load", {}, {"running": str(running)})


def send_all(stream: socket.socket, traffic: Sequence[Message]) -> None:
    """Send examples of which none is trained on before the last has come."""
    for message in (load(9), *traffic, load(0)):
        send(stream, message)


def next_message(stream: socket.socket, kind: str) -> Message:
    """Return the next message of a kind; a candidate comes before the status that says how heads compare."""
    while message := receive(stream):
        if message.kind == kind:
            return message
        assert message.facts.get("tau", "nan") == "nan", "the head in use drafts as well as the one that was trained"
    raise AssertionError(f"the stream ended without a message of kind {kind}")


@pytest.fixture
def words(head: Head, tiny_target: LlamaTarget, tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    """The command line with which a server starts the process."""
    folder = tmp_path / "head"
    folder.mkdir()
    facts = {"verifier": "tiny", "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": STEPS}
    save_head(head, folder, **facts, provenance={"target_fingerprint": tiny_target.fingerprint})
    model = ["model=demo", f"model.path={tiny_target_folder}", "head=eagle3", f"head.path={folder}"]
    learning = [f"learning.{key}={value}" for key, value in SETTINGS.items()]
    return [*model, *learning, f"draft_tokens={STEPS}", f"output_dir={tmp_path / 'outputs'}"]


@contextmanager
def child(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "HEADWAY_LEARN_FD": str(theirs.fileno())}
    command = [sys.executable, str(ROOT / "train" / "learn.py"), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {"env": environment, "pass_fds": [theirs.fileno()], "cwd": "/", "start_new_session": True}
    with ours, subprocess.Popen(command, **options, **pipes) as process:
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()


def test_a_head_that_drafts_better_comes_back(
    words: list[str], traffic: list[Message], head: Eagle3Head, tmp_path: Path
) -> None:
    """In a process of its own, as a server starts it; nothing is written. It says how far it is after every update."""
    with child(words) as (process, stream):
        assert next_message(stream, "status").facts["updates"] == "0"
        send_all(stream, traffic)
        assert next_message(stream, "status").facts["updates"] == "1"
        candidate = next_message(stream, "candidate")
        status = next_message(stream, "status")
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + SETTINGS["nice"])
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == niceness
        group = Path(f"/proc/{process.pid}/autogroup")  # of its session, on Linux with CONFIG_SCHED_AUTOGROUP
        assert not group.exists() or group.read_text().split()[-1] == str(SETTINGS["nice"])
        stream.shutdown(socket.SHUT_WR)
        output = process.communicate()
        assert (process.returncode, *output) == (0, "", "")
    facts = candidate.facts
    assert facts["number"] == "1"
    assert int(facts["examples"]) == len(traffic)
    assert int(facts["updates"]) > 0
    assert float(facts["tau_after"]) > float(facts["tau_before"]) + 0.05
    assert status.facts["tau"] == facts["tau_after"]
    assert int(status.facts["buffered"]) == int(facts["tokens"]) == sum(len(m.tensors["ids"]) for m in traffic)
    served = make_like(head, candidate)
    assert [f"{tau_on_held_back(each, traffic):.4f}" for each in (head, served)] == [
        facts["tau_before"],
        facts["tau_after"],
    ]
    assert not (tmp_path / "outputs").exists()


def held_back_of(traffic: Sequence[Message], head: Head) -> list[Example]:
    return [example for example in examples_of(traffic, head) if is_held_back(example.ids, SETTINGS["held_back"])]


def tau_on_held_back(head: Head, traffic: Sequence[Message]) -> float:
    return compared(*[accepted(head, held_back_of(traffic, head), STEPS)] * 2).before


def make_like(head: Head, candidate: Message) -> Head:
    """Return a head with the tensors of a candidate, taken as strictly as those of a file."""
    other = type(head)(head.config)
    load_into(other, candidate.tensors, checkpoint_layout(other), source="candidate")
    return other.requires_grad_(False)


def test_a_signal_ends_the_process(words: list[str], traffic: list[Message]) -> None:
    with child(words) as (process, stream):
        next_message(stream, "status")
        with suppress(BrokenPipeError):
            send_all(stream, traffic[:3])
            process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_a_broken_message_ends_the_process_with_an_error(words: list[str]) -> None:
    with child(words) as (process, stream):
        next_message(stream, "status")
        stream.sendall(b"\xff" * 8)
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: a message states 18446744073709551615 bytes")
    assert err.count("\n") == 1


def test_without_a_server_there_is_nothing_to_learn_from(forked: Any) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HEADWAY_LEARN_FD"}
    result = forked([ROOT / "train" / "learn.py"], env=environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert "python infer/serve.py learn=true" in result.stderr


def test_a_stream_that_ends_within_a_message(words: list[str]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\1\0")
        ours.shutdown(socket.SHUT_WR)
        with ours, pytest.raises(ValueError, match="ends within a message"):
            learn(compose("learn", LearnConfig, words), theirs)


def learnt(config: LearnConfig, traffic: Sequence[Message]) -> Message:
    """Return the first head that the process sends."""
    with beside(lambda stream: learn(config, stream)) as stream:
        send_all(stream, traffic)
        return next_message(stream, "candidate")


def test_what_was_taken_over_is_kept_if_it_is_asked_for(
    words: list[str], traffic: list[Message], tmp_path: Path, tiny_target: LlamaTarget
) -> None:
    place = tmp_path / "outputs" / "heads" / "demo" / "eagle3-learned"
    (place / "7").mkdir(parents=True)  # of an earlier server
    config = compose("learn", LearnConfig, [*words, "learning.save=true", "learning.keep=1"])
    candidate = learnt(config, traffic)
    assert candidate.facts["number"] == "8"
    assert [path.name for path in place.iterdir()] == ["8"]
    saved = load_head(place / "8", name="eagle3", target=tiny_target)
    tensors = checkpoint_tensors(saved)
    assert tensors.keys() == candidate.tensors.keys()
    assert all(torch.equal(value, candidate.tensors[name]) for name, value in tensors.items())
    examples = held_back_of(traffic, saved)
    pairs = [batch_of([example], saved.config.aux_layers) for example in examples]
    assert rank_accuracy(place / "8") == rank_accuracies(saved, pairs, STEPS)  # for proposer.tree=measured


@pytest.mark.parametrize("lr", [1e-7, 3.0])
def test_a_head_that_drafts_no_better_is_not_sent(lr: float, head: Eagle3Head, traffic: list[Message]) -> None:
    """One that is ruined begins anew from the head in use, which learnt before."""
    good = fed(make_learner(head), traffic)
    while good.update_due:
        good.update()
    assert good.compare().better
    before = {name: value.clone() for name, value in good.used.state_dict().items()}
    learner = fed(make_learner(good.used, lr=lr), traffic)
    while not learner.comparison_due:
        learner.update()
    ruined = lr > 1
    comparison = learner.compare()
    assert (comparison.better, comparison.worse) == (False, ruined)
    assert learner.tau > 1.15
    for name, value in learner.used.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert ruined == all(torch.equal(value, before[name]) for name, value in learner.candidate.state_dict().items())
    with exchanging(make_learner(good.used, lr=lr)) as stream:
        assert next_message(stream, "status").facts["tau"] == "nan"
        send_all(stream, traffic)
        with pytest.raises(AssertionError, match="drafts as well"):
            next_message(stream, "candidate")


def test_it_waits_while_requests_run(head: Eagle3Head, traffic: list[Message]) -> None:
    learner = make_learner(head)
    with exchanging(learner, pause_above=1) as stream:
        next_message(stream, "status")
        for message in (load(2), *traffic):
            send(stream, message)
        assert select.select([stream], [], [], 1.0) == ([], [], [])
        assert learner.updates == 0
        send(stream, load(1))
        assert int(next_message(stream, "status").facts["updates"]) > 0


def test_it_trains_on_no_example_that_is_held_back(
    head: Eagle3Head, traffic: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Example] = []

    def batch(examples: list[Example], *rest: Any) -> Any:
        trained.extend(examples)
        return batch_of(examples, *rest)

    monkeypatch.setattr(learner_module, "batch_of", batch)
    learner = fed(make_learner(head), traffic)
    while learner.update_due:
        learner.update()
    share = SETTINGS["held_back"]
    ids = {tuple(example.ids.tolist()) for example in trained}
    examples = examples_of(traffic, head)
    assert ids == {tuple(e.ids.tolist()) for e in examples if not is_held_back(e.ids, share)}
    held_back = {tuple(example.ids.tolist()) for example in learner.judged.examples}
    assert held_back == {tuple(e.ids.tolist()) for e in examples if is_held_back(e.ids, share)}
    assert 0.15 < len(held_back) / len(examples) < 0.45
    assert not ids & held_back


def test_each_example_is_drawn_as_often_as_is_said(head: Eagle3Head, traffic: list[Message]) -> None:
    learner = fed(make_learner(head, passes=3.0, every_tokens=1), traffic)
    tokens = learner.trained.tokens
    assert not learner.comparison_due
    while learner.update_due:
        learner.update()
    assert 3 * tokens - SETTINGS["batch_tokens"] < 3 * tokens - learner.due <= 3 * tokens
    assert learner.comparison_due
    assert not fed(make_learner(head), traffic[:5]).comparison_due  # too few to judge on


def test_heads_are_compared_though_more_is_served_than_there_is_time_to_train_on(
    head: Eagle3Head, traffic: list[Message]
) -> None:
    learner = fed(make_learner(head, every_tokens=100), traffic)
    while not learner.comparison_due:
        learner.update()
    assert learner.update_due
    assert learner.done >= learner.config.passes * 100
    learner.compare()
    assert not learner.comparison_due


def plain_example(length: int, number: int, prompt: int = 1) -> Example:
    ids = torch.full((length,), number)
    assistant = torch.arange(length) >= prompt
    return Example(ids, torch.randn(length, 3, 4), ids[:, None], torch.zeros(length, 1), assistant, 0, 0.0, 0)


def test_a_full_buffer_drops_the_oldest() -> None:
    buffer = Buffer(100)
    for number in range(30):
        buffer.add(plain_example(10 + number % 3, number))
        assert buffer.tokens == sum(len(example.ids) for example in buffer.examples) <= 100
    kept = [int(example.ids[0]) for example in buffer.examples]
    assert kept == list(range(30 - len(kept), 30))
    assert len(kept) == 9
    drawn = buffer.draw(40, torch.Generator().manual_seed(0))
    assert 28 < sum(len(example.ids) for example in drawn) <= 40
    assert len({int(example.ids[0]) for example in drawn}) == len(drawn)


def test_what_is_due_falls_with_what_was_dropped(head: Eagle3Head, traffic: list[Message]) -> None:
    learner = make_learner(head, buffer_tokens=600, passes=2.0)
    for _ in range(5):
        fed(learner, traffic)
    assert learner.trained.tokens <= 600
    assert learner.due == 2 * learner.trained.tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer_tokens": 600_000, "most_mb": 512}, r"buffer_tokens=600000: takes 763 MB .* holds 402653; change"),
        ({"buffer_tokens": 10_000}, "batch_tokens=2048: is more than the 1111 tokens"),
        ({"most_mb": 1}, "batch_tokens=2048: is more than the 87 tokens"),
    ],
)
def test_examples_that_take_too_much_or_too_little(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"learning.{message}"):
        rooms(LearningConfig(**settings), 1000)


def test_as_many_examples_are_kept_as_memory_holds() -> None:
    assert rooms(LearningConfig(), 1000) == (200_000, 22_222)
    assert rooms(LearningConfig(), 4000) == (115_043, 12_782)
    assert rooms(LearningConfig(replay="outputs/run/data"), 4000) == (86_282, 9_586)  # a quarter less


def test_of_a_long_example_the_end_is_kept() -> None:
    example = plain_example(50, 1, prompt=30)
    cut = last_tokens(example, 25)
    assert (cut.assistant.tolist(), cut.first, len(cut.ids)) == ([False] * 5 + [True] * 20, 25, 25)
    assert torch.equal(cut.states, example.states[25:])
    assert cut.states.untyped_storage().nbytes() == cut.states.nbytes
    again = last_tokens(cut, 10)
    assert (again.assistant.tolist(), again.first) == ([True] * 10, 40)
    assert last_tokens(example, 50) is example


def test_batches_hold_each_example_once() -> None:
    examples = [plain_example(length, number, prompt=2) for number, length in enumerate((20, 30, 12, 9))]
    batch, features = batch_of(examples, (0, 2, 2, 5), 32)
    assert batch.ids.shape == (3, 32)
    assert len(features.aux) == 4
    for index, place in zip(batch.rows, batch.places, strict=True):
        example, span = examples[index], slice(place.first, place.first + len(examples[index].ids))
        assert torch.equal(batch.ids[place.row, span], example.ids)
        assert batch.assistant[place.row, span].tolist() == [False] * 2 + [True] * (len(example.ids) - 2)
        for aux, layer in zip(features.aux, (0, 1, 1, 2), strict=True):
            assert torch.equal(aux[place.row, span], example.states[:, layer])
        assert features.top is not None
        assert torch.equal(features.top.ids[place.row, span], example.top_ids)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"ids": torch.tensor([1, 384, 2])}, "ids, states, top_ids, top_log_probs, prompt"),
        ({"ids": torch.zeros(41)}, "ids"),
        ({"states": torch.zeros(41, 2, 64)}, "states"),
        ({"states": torch.zeros(41, 3, 64).int()}, "states"),
        ({"top_ids": torch.full((41, 8), -1)}, "top_ids"),
        ({"top_ids": torch.zeros(41, 7).long()}, "top_log_probs"),
        ({"top_log_probs": torch.zeros(40, 8)}, "top_log_probs"),
        ({"prompt": "0"}, "prompt"),
        ({"prompt": "42"}, "prompt"),
        ({"temperature": "nan"}, "temperature"),
        ({"seed": "-1"}, "seed"),
        ({"first": "-2"}, "first"),
    ],
)
def test_an_example_of_something_else_is_refused(
    change: dict[str, Any], wrong: str, head: Eagle3Head, traffic: list[Message]
) -> None:
    _, tensors, facts = traffic[0]
    message = Message(
        "example",
        {name: change.get(name, value) for name, value in tensors.items()},
        {**facts, **{name: value for name, value in change.items() if isinstance(value, str)}},
    )
    with pytest.raises(ValueError, match=rf"^example 0: {wrong}: not as of a request"):
        read_example(message, head.config)


def test_messages_that_lack_something_are_refused(head: Eagle3Head, traffic: list[Message]) -> None:
    _, tensors, facts = traffic[0]
    with pytest.raises(ValueError, match="example 0: holds ids; must hold ids, states, top_ids, top_log_probs"):
        read_example(Message("example", {"ids": tensors["ids"]}, facts), head.config)
    with pytest.raises(ValueError, match="example: prompt, first, temperature and seed must be numbers"):
        read_example(Message("example", tensors, {"prompt": "9"}), head.config)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("candidate", {}, {}), "candidate: no message for a trainer"),
        (Message("load", {}, {}), "load: running='' must be"),
        (load(-1), "load: running='-1' must be"),
    ],
)
def test_messages_that_are_not_for_it(message: Message, error: str, head: Eagle3Head) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, message)
        with pytest.raises(ValueError, match=error):
            exchange(make_learner(head), theirs, 0, None)


def stats(steps: Sequence[int]) -> list[SpeculationStats]:
    return [SpeculationStats(steps=each, emitted=40) for each in steps]


def test_two_heads_are_compared_by_the_same_examples() -> None:
    """A small gain of every example counts, however much examples differ; a large one of one of them does not."""
    before = [10, 20, 30, 40, 15, 25, 35, 38]
    small = compared(stats(before), stats([steps - 1 for steps in before]))
    assert (small.before, small.after) == (320 / 213, 320 / 205)
    assert (small.better, small.worse) == (True, False)
    few = compared(stats(before), stats([11, 21, 30, 40, 15, 25, 35, 33]))
    assert few.after > few.before
    assert (few.better, few.worse) == (False, False)
    back = compared(stats([steps - 1 for steps in before]), stats(before))
    assert (back.better, back.worse) == (False, True)
    same = compared(stats(before), stats(before))
    assert (same.better, same.worse, same.error) == (False, False, 0)


def test_the_error_of_a_comparison_is_that_of_many_draws() -> None:
    """The standard deviation of the difference over samples of examples is the error that one of them states."""
    generator = torch.Generator().manual_seed(0)
    gains, errors = [], []
    for _ in range(400):
        old = torch.randint(10, 40, (50,), generator=generator)
        new = (old + torch.randint(-4, 3, (50,), generator=generator)).clamp(min=1)
        result = compared(stats(old.tolist()), stats(new.tolist()))
        gains.append(result.after - result.before)
        errors.append(result.error)
    assert torch.tensor(gains).std().item() == pytest.approx(torch.tensor(errors).mean().item(), rel=0.15)


@pytest.mark.parametrize("cut", [False, True])
def test_judging_is_what_the_engine_accepts(cut: bool, engine: Engine, tiny_target: LlamaTarget,
    served: tuple[list[Completion], list[SamplingParams]]) -> None:  # fmt: skip
    """Greedy and sampled, and also where the beginning of a request is not there: this head reads no context."""
    completions, params = served[0][:8], served[1][:8]
    head = heads.make_head(tiny_target, "mlp")
    heads.memorise(head, engine.target, Sequences.of_completions(completions), STEPS)
    engine.set_proposer("head", head)
    try:
        drafted = engine.generate([completion.prompt_ids for completion in completions], params)
    finally:
        engine.set_proposer("none")
    examples = examples_of(list(messages_of(engine, completions, params, head)), head)
    examples = [last_tokens(example, 33 if cut else 100) for example in examples]
    counts = accepted(head, examples, STEPS)
    assert [(each.steps, each.emitted, each.accepted) for each in counts] == [
        (each.stats.steps, each.stats.emitted, each.stats.accepted) for each in drafted
    ]
    assert any(each.accepted for each in counts[1::2])  # of sampled ones


@pytest.mark.parametrize("variant", heads.ONE_OF_EACH)
def test_heads_learn_or_say_that_they_cannot(
    variant: str, engine: Engine, tiny_target: LlamaTarget, served: tuple[list[Completion], list[SamplingParams]]
) -> None:
    head = heads.make_head(tiny_target, variant).requires_grad_(False)
    name = heads.VARIANTS[variant][0]
    if name in ("eagle", "draft-model"):
        with pytest.raises(ValueError, match=rf"head={name}: cannot learn from what it serves: .* can: eagle3, mtp,"):
            make_learner(head)
        return
    completions, params = served[0][:40], served[1][:40]
    learner = fed(make_learner(head), list(messages_of(engine, completions, params, head)))
    before = {name: value.clone() for name, value in learner.candidate.state_dict().items()}
    learner.update()
    changed = [key for key, value in learner.candidate.state_dict().items() if not torch.equal(value, before[key])]
    trained = {key for key, parameter in learner.candidate.named_parameters() if parameter.requires_grad}
    assert changed
    assert set(changed) <= trained
    for key, value in learner.used.state_dict().items():
        assert torch.equal(value, before[key]), key
    comparison = learner.compare()
    assert comparison.before >= 1
    assert comparison.after >= 1


def test_only_the_targets_embedding_and_lm_head_are_loaded(tiny_target_folder: Path) -> None:
    target = load_target(str(tiny_target_folder), layers=())
    assert all(parameter.is_meta for parameter in target.layers.parameters())
    assert not target.embed_tokens.weight.is_meta
