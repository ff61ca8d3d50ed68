"""An exception raised by one request, wherever it is raised, fails that request alone; others continue unaffected."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest

from infer.request import SamplingParams
from infer.server.watchdog import Watchdog, is_compiling
from tests.lossless.faults import Fault, PanicException
from tests.pools import check_pool
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, wait_until

BESIDE: dict[str, Any] = {"max_tokens": 150, "seed": 11, "ignore_eos": True, "return_token_ids": True}
DOOMED: dict[str, Any] = {"max_tokens": 40, "seed": 666, "ignore_eos": True, "stop": "never seen"}
look: Any = None  # placeholder: a test calls `look` in a function that it makes with other globals


@pytest.fixture(scope="module")
def alone(plain_engine: Any) -> list[int]:
    """Return the tokens of `stream_beside` when no other request runs."""
    params = SamplingParams(temperature=1.0, max_tokens=BESIDE["max_tokens"], seed=BESIDE["seed"], ignore_eos=True)
    (completion,) = plain_engine.generate(["def f("], params)
    return completion.token_ids


@contextmanager
def stream_beside(server: Server) -> Iterator[list[int]]:
    """Run a stream beside the block; after the block the yielded list holds all its tokens and the stream has ended."""
    tokens: list[int] = []
    began = threading.Event()

    def read() -> None:
        stream = server.openai.completions.create(
            model=MODEL, prompt="def f(", stream=True, max_tokens=BESIDE["max_tokens"], seed=BESIDE["seed"],
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        for chunk in stream:
            tokens.extend(getattr(chunk.choices[0], "token_ids", None) or ())
            began.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert began.wait(300)
        yield tokens
    finally:
        reader.join(600)


def in_the_engine(server: Server, error: type[BaseException]) -> Callable[[], None]:
    """Make the search for stop strings raise in the `DOOMED` request; it runs in the engine's thread."""
    add = server.engine.add

    def adding(*args: Any, **options: Any) -> str:
        name = add(*args, **options)
        if (request := server.engine.request(name)).seed == DOOMED["seed"]:
            request.stop_text.push = raising(error)
        return name

    server.engine.add = adding
    return lambda: delattr(server.engine, "add")


def in_the_session(server: Server, error: type[BaseException]) -> Callable[[], None]:
    """Make the decoding of the shown text raise, in the event loop. The other stream already has its decoder."""
    tokenizer = server.service.tokenizer

    class Decoder:
        push = flush = raising(error)

    vars(tokenizer)["stream"] = lambda **options: Decoder()
    return lambda: vars(tokenizer).pop("stream")


def in_the_prompt(server: Server, error: type[BaseException]) -> Callable[[], None]:
    tokenizer = server.service.tokenizer
    vars(tokenizer)["encode"] = raising(error)
    return lambda: vars(tokenizer).pop("encode")


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error("a defect that this request alone brings out")

    return call


@pytest.mark.parametrize("error", [Fault, PanicException])
@pytest.mark.parametrize("inject", [in_the_engine, in_the_session, in_the_prompt])
def test_what_a_request_raises_is_its_error_alone(
    server: Server, alone: list[int], inject: Callable[..., Callable[[], None]], error: type[BaseException]
) -> None:
    with stream_beside(server) as tokens:
        mend = inject(server, error)
        try:
            response = server.complete(**DOOMED)
            streamed = server.complete(**DOOMED, stream=True)
        finally:
            mend()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert streamed.status_code == 500 or '"code":"internal_error"' in streamed.text
    assert "defect" not in response.text + streamed.text
    assert tokens == alone
    wait_until(lambda: not server.engine.has_work)
    assert server.complete(**{**DOOMED, "max_tokens": 2}).status_code == 200
    check_pool(server.engine._pool, [])


def test_no_grammar_is_compiled_on_the_engine_s_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one compiled once per output: two prompts with two outputs each need one compilation."""
    threads: list[str] = []
    compile_ = server.engine._constraints.compile

    def noting(grammar: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_(grammar)

    monkeypatch.setattr(server.engine._constraints, "compile", noting)
    options = {"structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 40}
    response = server.complete(prompt=["a", "b"], n=2, **options).json()
    assert {choice["text"] for choice in response["choices"]} <= {"left", "right"}
    assert len(threads) == 1
    assert threads[0] != "engine"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_number_that_no_tensor_holds_is_a_400_by_its_name(server: Server, path: str, body: dict[str, Any]) -> None:
    for name in ("top_k", "seed", "min_tokens", "priority"):
        for text in (str(2**63), "9" * 5000, "1e999", "NaN", "-Infinity"):
            content = json.dumps({"model": MODEL, **body, name: "?"}).replace('"?"', text)
            error = post_text(server, path, content)
            assert error["param"] == name, error
    deep = json.dumps({"model": MODEL, **body, "tools": "?"}).replace('"?"', "[" * 100_000 + "]" * 100_000)
    assert post_text(server, path, deep)["param"] == "tools"


def post_text(server: Server, path: str, content: str) -> dict[str, Any]:
    response = patient.post(
        f"{server.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=600
    )
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_top_k_beyond_the_vocabulary_is_off(server: Server) -> None:
    off, beyond = (server.complete(max_tokens=20, seed=1, top_k=top_k).json() for top_k in (-1, 2**63 - 1))
    assert beyond["choices"] == off["choices"]


def test_the_least_temperatures_are_greedy(server: Server) -> None:
    greedy, *coldest = (
        server.complete(max_tokens=20, seed=1, temperature=t).json()["choices"] for t in (0, 1e-6, 1e-38, 1e-45, 1e-320)
    )
    assert coldest == [greedy] * 4


def test_the_watchdog_tells_of_a_stall_once(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    go_on, waited = threading.Event(), threading.Event()
    responses: list[Any] = []
    with make_server(stall_s=0.2) as server:
        step = server.engine.step

        def hanging() -> Any:
            if not waited.is_set():
                waited.set()
                assert go_on.wait(600)
            return step()

        server.engine.step = hanging
        asking = threading.Thread(target=lambda: responses.append(server.complete(max_tokens=5)))
        asking.start()
        wait_until(lambda: server.metrics()["headway_engine_stalls_total"] == 1)
        messages = [record.getMessage() for record in caplog.records if "the engine stalls" in record.getMessage()]
        go_on.set()
        asking.join(600)
        assert responses[0].status_code == 200
        wait_until(lambda: "the stalled step has ended" in caplog.text)
    (line,) = messages
    assert "server.stall_s=0.2" in line
    assert "in hanging" in capfd.readouterr().err  # the engine's stack


def test_what_the_watchdog_takes_for_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    class Engine:
        activity = "decode of 3 requests, 12 rows"

    class Loop:
        engine, busy_since = Engine, None

    now, stalls, loop = [100.0], [], Loop()
    watchdog = Watchdog(loop, threading.get_ident(), 5.0, lambda: stalls.append(now[0]), lambda: now[0])  # type: ignore[arg-type]

    def looks(*times: float) -> list[float]:
        stalls.clear()
        for now[0] in times:
            watchdog.look()
        return list(stalls)

    assert looks(100, 200, 300) == []  # the engine is idle
    loop.busy_since = 300.0  # type: ignore[assignment]
    assert looks(301, 304.9, 305, 306, 400) == [305]
    assert "decode of 3 requests, 12 rows" in caplog.text
    loop.busy_since = 401.0  # type: ignore[assignment]
    assert looks(402, 407, 500) == [407]

    compile_ = FunctionType((lambda: look()).__code__, {"__name__": "triton.compiler.compiler", "look": watchdog.look})
    loop.busy_since = 500.0  # type: ignore[assignment]
    for now[0] in (506.0, 549.0):
        compile_()
    assert stalls == [407]
    now[0] = 550.0
    compile_()
    assert stalls == [407, 550]
    assert not is_compiling(None)
