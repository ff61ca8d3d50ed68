"""A head that learns from what is served: no token changes, and requests that say no are no examples."""

from __future__ import annotations

import copy
import json
import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import EngineConfig, LearningConfig, ModelConfig, ProposerConfig, ServeConfig
from infer.engine import Engine
from infer.learning.candidates import read_candidate
from infer.learning.loop import LearningLoop
from infer.learning.messages import Message, receive, send
from infer.learning.outbox import Outbox, bytes_of
from infer.learning.recording import RecordingRunner
from infer.learning.status import LearningStatus
from infer.learning.traffic import Example
from infer.learning.trainer import words_of
from infer.options.cli import compose
from infer.options.literal_text import literal_overrides
from infer.request import SamplingParams, StepOutput
from infer.serve import run
from infer.server.engine_loop import Add, Command, EngineLoop, Event
from models.heads.config import HeadConfig
from models.heads.files import load_head, save_head
from models.heads.weights import checkpoint_tensors
from models.targets import load_target
from tests.heads import VARIANTS, make_head
from tests.lossless.plain import ids
from tests.pairwise import parametrize_each
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, repeat_until, wait_until
from tests.server.test_process import start
from train.config import LearnConfig

# so that a tiny head learns within some requests, while others run, and other programs too
EAGER = LearningConfig(
    buffer_tokens=4000,
    held_back=0.3,
    every_tokens=400,
    passes=4.0,
    batch_tokens=128,
    lr=5e-3,
    pause_above=99,
    nice=0,
)


def learning_of(server: Server) -> LearningLoop:
    return server.service.runtime.learning


def status_of(server: Server) -> LearningStatus:
    return learning_of(server).status


def test_learning_changes_no_token(make_server: MakeServer, plain_engine: Any) -> None:
    """The head learns in its process, beside requests that run on while its weights change."""
    kinds = ["x = 1\n", "def f(", "import os", "return a"]
    bodies = [
        {"prompt": kinds[n % 4] + str(n % 10), "max_tokens": 32, "temperature": 0.4 * (n % 2), "seed": n % 20}
        for n in range(20)
    ]
    with make_server(learning=EAGER) as server:
        prompts = [server.ids(body["prompt"]) for body in bodies]
        expected = [
            plain_engine.generate([prompt], SamplingParams(
                max_tokens=32, ignore_eos=True, temperature=body["temperature"], seed=body["seed"]
            ))[0].token_ids
            for prompt, body in zip(prompts, bodies, strict=True)
        ]  # fmt: skip
        update, running = server.engine.update_head, []

        def update_head(head: Any) -> None:
            running.append(server.engine.stats.running)
            update(head)

        server.engine.update_head = update_head

        def answer(body: dict[str, Any]) -> list[int]:
            return server.complete(**body, ignore_eos=True, return_token_ids=True).json()["choices"][0]["token_ids"]

        with ThreadPoolExecutor(4) as pool:

            def answer_all() -> None:
                assert list(pool.map(answer, bodies)) == expected

            repeat_until(lambda: max(running, default=0) > 0, answer_all)
        wait_until(lambda: status_of(server).taken_over == len(running) and bool(status_of(server).history))
        status = status_of(server)
        assert status.tau_after > status.tau_before
        assert status.history[-1][1] == status.tau > 1.0
        assert status.updates > 0
        assert status.buffered > 0
        assert status.examples > 20
        assert status.running


class ByHand:
    """A trainer whose messages a test writes and reads at `theirs`."""

    def __init__(self) -> None:
        self.stream, self.theirs = socket.socketpair()
        send(self.theirs, Message("status", {}, {}))
        self.received: list[Message] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        with suppress(ValueError):  # the stream may end within a message
            while (message := receive(self.theirs)) is not None:
                self.received.append(message)

    def facts(self, kind: str, name: str) -> list[int]:
        return [int(message.facts[name]) for message in self.received if message.kind == kind]

    def why_ended(self) -> str:
        return "a test ended it"

    def close(self) -> None:
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def trainer() -> Iterator[ByHand]:
    by_hand = ByHand()
    with by_hand.stream, by_hand.theirs:
        yield by_hand
        by_hand.close()
        by_hand.reader.join()


# the head's weights as they are, or quantized; the target in two processes
ENGINES: dict[str, dict[str, Any]] = {"same": {}, "int8": {"head_weights": "int8"}, "ranks": {"tensor_parallel": 2}}


@pytest.fixture(params=ENGINES)
def engine(tiny_target_folder: Path, tiny_head_folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine.load(
        ModelConfig(name=MODEL, path=str(tiny_target_folder), device="cpu"),
        HeadConfig(name="eagle3", path=str(tiny_head_folder)),
        EngineConfig(max_batch=3, threads=2, **ENGINES[request.param]),
        ProposerConfig(name="head", max_draft_tokens=4),
    )
    yield engine
    engine.close()


def plain(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    return [engine.generate([prompt], replace(params, speculate=False))[0].token_ids for prompt, params in requests]


def candidates(target_folder: Path, head_folder: Path) -> list[Message]:
    """Return the head itself and one that drafts otherwise, as a trainer sends them."""
    head = load_head(head_folder, target=load_target(str(target_folder)))
    other = copy.deepcopy(head)
    with torch.no_grad():
        dict(other.named_parameters())["fc.weight"].neg_()
    facts = {"number": "1", "tau_before": "1.2", "tau_after": "1.5", "replay_before": "1.4", "replay_after": "1.3"}
    return [Message("candidate", checkpoint_tensors(each), facts) for each in (head, other)]


def served(loop: EngineLoop, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Run the loop until these requests have ended; return their tokens."""
    responses: list[list[int]] = [[] for _ in requests]
    ended = 0

    def report(events: list[Event], _stats: Any) -> None:
        nonlocal ended
        for event in events:
            assert isinstance(event, StepOutput)
            responses[int(event.request_id)] += event.token_ids
            ended += event.finish_reason is not None
        if ended == len(requests):
            loop.commands.put(None)

    loop.report = report
    for number, (prompt, params) in enumerate(requests):
        loop.commands.put(Add(str(number), prompt, params))
    loop.run()
    return responses


REQUESTS = [
    ([5 + n, 6, 7, 8], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8 * (n % 2), seed=n))
    for n in range(5)
]


def loop_of(engine: Engine, trainer: ByHand) -> EngineLoop:
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    learning = LearningLoop(engine, trainer)  # type: ignore[arg-type]
    return EngineLoop(engine, commands, lambda *_: None, learning=learning)


def test_weights_that_change_within_requests_change_no_token(
    engine: Engine, trainer: ByHand, tiny_target_folder: Path, tiny_head_folder: Path
) -> None:
    """Between any two steps that decode, the head changes to another and back."""
    heads = candidates(tiny_target_folder, tiny_head_folder)
    embedding, expected = engine.target.embedding_weight.clone(), plain(engine, REQUESTS)
    loop, step, steps = loop_of(engine, trainer), engine.step, 0
    assert loop.learning is not None
    inbox = loop.learning._inbox

    def step_and_send() -> list[StepOutput]:
        nonlocal steps
        outputs = step()
        steps += 1
        send(trainer.theirs, heads[steps % 2])
        wait_until(lambda: not inbox.empty())
        return outputs

    engine.step = step_and_send  # type: ignore[method-assign]
    responses = served(loop, REQUESTS)
    wait_until(lambda: len(trainer.facts("example", "number")) == len(REQUESTS))
    wait_until(lambda: trainer.facts("load", "running")[-1] == 0)
    loop.learning.close()
    assert responses == expected
    assert loop.learning.status.taken_over == steps > 20
    assert (loop.learning.status.tau_after, loop.learning.status.replay_after) == (1.5, 1.3)
    assert loop.learning.status.examples == len(REQUESTS)
    assert engine.stats.speculation.accepted > 0
    assert torch.equal(engine.target.embedding_weight, embedding)
    assert trainer.facts("example", "number") == [1, 2, 3, 4, 5]
    assert {message.kind for message in trainer.received} == {"example", "load"}


BROKEN = {
    "missing": lambda tensors: tensors.pop("fc.weight"),
    "unknown": lambda tensors: tensors.update(other=torch.zeros(1)),
    "shape": lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][1:]}),
    "dtype": lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].bfloat16()}),
    "not finite": lambda tensors: tensors["norm.weight"].fill_(torch.nan),
    "vocabulary": lambda tensors: tensors["d2t"].add_(1),
    "no embedding": lambda tensors: tensors.pop("embed_tokens.weight"),
}


@pytest.mark.parametrize("engine", ["same"], indirect=True)
def test_broken_candidates_are_refused_and_serving_goes_on(
    engine: Engine, trainer: ByHand, tiny_target_folder: Path, tiny_head_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.head is not None
    before = {name: value.clone() for name, value in engine.head.state_dict().items()}
    expected = plain(engine, REQUESTS[1:2])
    loop = loop_of(engine, trainer)
    assert loop.learning is not None
    wrong, good = candidates(tiny_target_folder, tiny_head_folder)
    inbox = loop.learning._inbox
    for number, (broken, spoil) in enumerate(BROKEN.items(), start=1):
        tensors = {name: value.clone() for name, value in wrong.tensors.items()}
        spoil(tensors)
        caplog.clear()
        send(trainer.theirs, wrong._replace(tensors=tensors))
        wait_until(lambda: not inbox.empty())
        assert served(loop, REQUESTS[1:2]) == expected, broken
        status = loop.learning.status
        assert (status.refused, status.taken_over, status.running) == (number, 0, True), broken
        assert all(torch.equal(value, before[name]) for name, value in engine.head.state_dict().items()), broken
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.getMessage().startswith("what the head has learnt is refused, and it stays as it is: "), broken
    send(trainer.theirs, good)
    wait_until(lambda: not inbox.empty())
    assert served(loop, REQUESTS[1:2]) == expected
    assert loop.learning.status.taken_over == 1
    loop.learning.close()


@parametrize_each(
    {
        "variant": [
            *("eagle3, the target's embedding", "mtp", "medusa", "lstm", "p-eagle", "dflash2, truncated", "dspark"),
        ],
        "dtype": ["float32", "bfloat16"],
    }
)
def test_a_head_of_each_kind_is_taken_over(
    tiny_target: Any, tiny_target_folder: Path, tmp_path: Path, variant: str, dtype: str
) -> None:
    """The engine then has the weights of an engine that was made with them. What it shares stays the target's."""
    folders = tmp_path / "before", tmp_path / "after"
    facts = {"verifier": "tiny", "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 3}
    provenance = {"target_fingerprint": tiny_target.fingerprint}
    for seed, folder in enumerate(folders):
        folder.mkdir()
        save_head(make_head(tiny_target, variant, seed=seed), folder, **facts, provenance=provenance)
    before, after = (
        Engine.load(
            ModelConfig(name=MODEL, path=str(tiny_target_folder), device="cpu", dtype=dtype),
            HeadConfig(name=VARIANTS[variant][0], path=str(folder)),
            EngineConfig(max_batch=2),
            ProposerConfig(name="head", max_draft_tokens=3),
        )
        for folder in folders
    )
    embedding = before.target.embedding_weight.clone()
    tensors = dict(checkpoint_tensors(load_head(folders[1], target=load_target(str(tiny_target_folder)))))
    shares = variant.endswith("the target's embedding")
    if shares:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1
    before.update_head(read_candidate(before, tensors))
    assert before.head is not None
    assert after.head is not None
    for name, value in after.head.state_dict().items():
        assert torch.equal(value, before.head.state_dict()[name]), name
    drafts = [ids(engine.generate([prompt for prompt, _ in REQUESTS], REQUESTS[1][1])) for engine in (before, after)]
    assert drafts[0] == drafts[1]
    assert before.stats.speculation == after.stats.speculation
    assert torch.equal(before.target.embedding_weight, embedding)
    assert shares == (getattr(before.head, "embed_tokens", None) is before.target.embed_tokens)


@pytest.mark.parametrize("engine", ["same"], indirect=True)
@pytest.mark.parametrize("message", [Message("greeting", {}, {}), Message("status", {}, {})], ids=lambda m: m.kind)
def test_what_no_trainer_says_ends_learning_and_nothing_else(
    engine: Engine, trainer: ByHand, message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    expected, loop = plain(engine, REQUESTS), loop_of(engine, trainer)
    assert loop.learning is not None
    send(trainer.theirs, message)
    inbox = loop.learning._inbox
    wait_until(lambda: not inbox.empty())
    assert served(loop, REQUESTS) == expected
    assert not loop.learning.status.running
    assert not isinstance(engine.steps.runner, RecordingRunner)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "it sent what cannot be read" in line
    assert line.endswith("a test ended it")
    loop.learning.close()


def example(tokens: int, number: int) -> Example:
    ids = torch.full((tokens,), number)
    return Example(ids, 0, 1, torch.zeros(tokens, 3, 4), ids[:, None].int(), torch.zeros(tokens, 1).half(), 0.0, number)


def test_examples_that_wait_are_bounded_and_the_oldest_go_first() -> None:
    room = 5 * bytes_of(example(10, 0))
    outbox = Outbox(room)
    for number in range(8):
        outbox.add(example(10, number))
    outbox.load(3)
    outbox.load(2)
    assert outbox.dropped == 3
    load, first = outbox.next(), outbox.next()
    assert load is not None
    assert (load.kind, load.facts) == ("load", {"running": "2"})
    assert first is not None
    assert first.facts["seed"] == "3"
    outbox.add(example(1000, 9))  # one that is larger than all the room
    assert outbox.dropped == 7
    last = outbox.next()
    assert last is not None
    assert (last.facts["seed"], last.facts["number"]) == ("9", "2")
    outbox.add(example(10, 10))
    outbox.close()
    assert outbox.next() is None


def test_requests_that_say_no_are_no_examples(make_server: MakeServer) -> None:
    body = {"max_tokens": 6, "ignore_eos": True}
    chat = body | {"model": MODEL, "messages": [{"role": "user", "content": "x = 1"}]}
    response = {"model": MODEL, "input": "x = 1", "max_output_tokens": 6, "ignore_eos": True}
    with make_server(learning=LearningConfig(nice=0)) as server:
        for no in ({"learn": False}, {"store": False}, {"cache_salt": "mine"}):
            assert server.complete(**body, **no, n=2).status_code == 200
            assert server.post("/v1/chat/completions", chat | no).status_code == 200
            assert server.post("/v1/messages", chat | no).status_code == 200
            assert server.post("/v1/responses", response | no).status_code == 200
        process = learning_of(server)._trainer._process
        assert learning_of(server)._recorder._running == {}
        assert status_of(server).examples == 0
        count = 0
        for yes in ({}, {"learn": True}, {"store": True, "learn": None}, {"store": None, "cache_salt": None}):
            assert server.complete(**body, **yes).status_code == 200
            assert server.post("/v1/chat/completions", chat | yes).status_code == 200
            assert server.post("/v1/messages", chat | yes).status_code == 200
            assert server.post("/v1/responses", response | yes).status_code == 200
            count += 4
            wait_until(lambda: status_of(server).examples == count)  # noqa: B023
        assert status_of(server).dropped == 0
        assert process.poll() is None
        assert server.finish() == 0
        assert process.returncode is not None, "the trainer ends with the server"


def test_a_killed_trainer_is_said_once_and_serving_goes_on(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with make_server(learning=EAGER) as server:
        text = server.complete(**body).json()["choices"][0]["text"]
        assert isinstance(server.engine.steps.runner, RecordingRunner)
        os.kill(learning_of(server)._trainer.pid, signal.SIGKILL)
        assert server.complete(**body).json()["choices"][0]["text"] == text
        wait_until(lambda: not status_of(server).running)
        examples = status_of(server).examples
        for _ in range(3):
            assert server.complete(**body).json()["choices"][0]["text"] == text
        assert status_of(server).examples == examples
        assert not isinstance(server.engine.steps.runner, RecordingRunner)
        assert server.finish() == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.startswith("the head learns no more, and stays as it is; ")
    assert line.endswith("signal 9")


def command(target: Path, head: Path, *words: str) -> list[str]:
    model = [f"model={target}", f"model.name={MODEL}", "head=eagle3", f"head.path={head}"]
    learning = ["learn=true", "learning.nice=0"]
    return [sys.executable, "infer/serve.py", *model, "engine.max_batch=4", "server.port=0", *learning, *words]


def test_the_command(
    tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path, started_here: Callable[[], list[int]]
) -> None:
    """Two tenants share the head. Ctrl-C in a terminal reaches the process group of the server alone."""
    keys = tmp_path / "keys"
    keys.write_text("the-first-key\nthe-second-key\n")
    words = [f"server.api_keys_file={keys}", "learning.shared=true", "learning.save=true", f"output_dir={tmp_path}"]
    with start(*command(tiny_target_folder, tiny_head_folder, *words)) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        trainer = int(process.wait_for(rf"process (\d+) trains the head .* {tmp_path}/heads/tiny/eagle3-learned/")[1])
        assert trainer in started_here()
        assert os.getpgid(trainer) != os.getpgid(process.child.pid)
        body = {"model": MODEL, "prompt": "x = 1", "max_tokens": 5}
        for key in ("the-first-key", "the-second-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert patient.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        assert process.end(signal.SIGINT) == 0
    wait_until(lambda: started_here() == [])
    assert "Traceback" not in process.output
    assert "learns no more" not in process.output


def test_a_server_without_a_head_begins_with_an_untrained_one(tiny_target_folder: Path, tmp_path: Path) -> None:
    model = [f"model={tiny_target_folder}", f"model.name={MODEL}", "head=eagle3", f"output_dir={tmp_path}"]
    eager = [f"learning.{key}={value}" for key, value in asdict(EAGER).items() if value is not None]
    words = [*model, "engine.max_batch=4", "server.port=0", "learn=true", *eager]
    folder = tmp_path / "heads" / MODEL / "eagle3-learned" / "0"
    body = {"model": MODEL, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    bodies = [{**body, "prompt": f"x = {n}"} for n in range(20)]
    responses = list[list[list[int]]]()
    for _ in range(2):  # the second one finds what the first one wrote
        with start(sys.executable, "infer/serve.py", *words) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
            process.wait_for("try: curl")

            def ask() -> None:
                told = [patient.post(f"{url}/v1/completions", json=body).json() for body in bodies]  # noqa: B023
                responses.append([response["choices"][0]["token_ids"] for response in told])

            ask()
            written = (folder / "model.safetensors").stat().st_mtime_ns
            repeat_until(lambda: patient.get(f"{url}/learning").json()["tau"] is not None, ask)  # noqa: B023
            assert process.end(signal.SIGINT) == 0
        assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert all(ids == responses[0] for ids in responses)
    assert json.loads((folder / "provenance.json").read_text())["untrained"] is True


def test_the_trainer_ends_with_a_server_that_was_killed(
    tiny_target_folder: Path, tiny_head_folder: Path, started_here: Callable[[], list[int]]
) -> None:
    with start(*command(tiny_target_folder, tiny_head_folder)) as process:
        process.wait_for("process [0-9]+ trains the head on what is served; nothing of it is written")
        process.child.kill()
        process.child.wait()
        wait_until(lambda: started_here() == [])


def test_a_head_that_cannot_learn_ends_the_start(
    tiny_target: Any, tiny_target_folder: Path, tmp_path: Path, started_here: Callable[[], list[int]]
) -> None:
    facts = {"verifier": "tiny", "verifier_architecture": "LlamaForCausalLM", "speculative_tokens": 3}
    provenance = {"target_fingerprint": tiny_target.fingerprint}
    save_head(make_head(tiny_target, "eagle"), tmp_path, **facts, provenance=provenance)
    with start(*command(tiny_target_folder, tmp_path, "head=eagle")) as process:
        assert process.ended() == 2
    assert "error: learn=true: head=eagle: cannot learn from what it serves" in process.output
    assert "Traceback" not in process.output
    wait_until(lambda: started_here() == [])


def test_an_engine_that_drafts_with_no_head_is_refused(tiny_target_folder: Path, trainer: ByHand) -> None:
    engine = Engine(load_target(str(tiny_target_folder)), proposer="ngram")
    with pytest.raises(ValueError, match="learn=true: proposer=ngram drafts with no head; say proposer=head"):
        LearningLoop(engine, trainer)  # type: ignore[arg-type]


REFUSED = {
    "server.replicas=2": "say server.replicas=1",
    "head=none": "head=none has nothing to train; say head=eagle3",
    "engine.graphs=on": "say engine.graphs=off",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_learn_is_refused_at_once(word: str) -> None:
    compose("serve", ServeConfig, [word])
    with pytest.raises(ValueError, match=f"learn=true: .*{re.escape(REFUSED[word])}"):
        compose("serve", ServeConfig, ["learn=true", word])


def test_tenants_share_a_head_only_if_the_operator_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-first-key\nthe-second-key\n")
    monkeypatch.setenv("HEADWAY_API_KEY", "the-third-key")
    config = compose("serve", ServeConfig, ["learn=true", f"server.api_keys_file={keys}"])
    with pytest.raises(ValueError, match=r"learn=true: 3 API keys are .* say learning\.shared=true if they may"):
        run(config)


def test_the_trainer_gets_the_server_s_own_settings(tmp_path: Path) -> None:
    """What its command line is read as, however odd the texts."""
    name, folder = "it's ${a}, b=c", f"{tmp_path}/a, 'b'/${{c}}"
    words = ["model=demo", "model.dtype=bfloat16", "head=medusa", "learning.lr=3e-5", "learning.buffer_tokens=90000"]
    config = compose("serve", ServeConfig, [*words, "proposer.tree=beam:3x6"])
    config = replace(config, model=replace(config.model, name=name, path=folder), output_dir=folder)
    config = replace(config, learning=replace(config.learning, replay=folder))
    read = compose("learn", LearnConfig, literal_overrides(words_of(config), LearnConfig))
    assert read == LearnConfig(config.model, read.head, config.learning, folder, draft_tokens=6)
    assert read.head.name == "medusa"
    trees = {"none": 4, "[[0], [1], [0, 0]]": 2, "measured": 4}
    for tree, depth in trees.items():
        words = ["head=eagle3", "proposer.max_draft_tokens=4", f"proposer.tree={tree}"]
        assert f"draft_tokens={depth}" in words_of(compose("serve", ServeConfig, words))
