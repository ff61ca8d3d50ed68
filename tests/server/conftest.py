"""Fixtures that start a real server on a real socket: uvicorn and the engine in threads, tiny random target, head."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infer.config import EngineConfig, LearningConfig, ModelConfig, ProposerConfig, ServeConfig, ServerConfig
from models.heads.config import HeadConfig
from tests.conftest import MakeTarget, Once
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.talking import CALL, make_talking_target, style_folder

if TYPE_CHECKING:
    import openai

    from models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def make_server(tiny_target_folder: Path, tiny_head_folder: Path) -> MakeServer:
    @contextmanager
    def make(
        *,
        proposer: str = "head",
        engine: EngineConfig | None = None,
        api_keys: Sequence[str] = (),
        target: Path | None = None,
        head_folder: Path | None = None,
        learning: LearningConfig | None = None,
        output_dir: str = "outputs",
        **server: Any,
    ) -> Iterator[Server]:
        """Start a server; `target` is another folder than the tiny random target's, and is loaded without a head.

        `head_folder` has another head. With `learning` the head learns, as with learn=true.
        """
        from infer.engine import Engine
        from infer.learning.loop import LearningLoop
        from infer.learning.trainer import Trainer
        from infer.server.address import bind, url
        from infer.server.lifecycle import Stopping, run
        from infer.server.runtime import Runtime
        from infer.server.service import Service

        model = ModelConfig(name=MODEL, path=str(target or tiny_target_folder), device="cpu")
        head = HeadConfig(name="eagle3", path=str(head_folder or tiny_head_folder))
        parts, drafts = engine or EngineConfig(max_batch=4), ProposerConfig(name=proposer, max_draft_tokens=4)
        config = ServerConfig(**server)

        def load() -> Engine:
            return Engine.load(model, head if target is None else None, parts, drafts)

        learn = None
        if learning is not None:
            command = ServeConfig(model, head, drafts, parts, output_dir, config, learn=True, learning=learning)
            learn = partial(LearningLoop, trainer=Trainer(command))
        runtime = Runtime(load, config, learn)
        listener = bind("127.0.0.1", 0)
        ready = threading.Event()
        state: dict[str, Any] = {}

        def on_ready(engine: Engine, service: Service) -> None:
            state["engine"], state["service"] = engine, service
            ready.set()

        async def main() -> int:
            state["loop"], state["stopping"] = asyncio.get_running_loop(), Stopping()
            # After the engine has died, the server stays up for as long as a test inspects it.
            return await run(
                MODEL, runtime, listener, state["stopping"], api_keys=api_keys, on_ready=on_ready, linger_s=600
            )

        def in_thread() -> None:
            state["code"] = asyncio.run(main())

        thread = threading.Thread(target=in_thread)
        thread.start()

        def ask() -> None:
            state["loop"].call_soon_threadsafe(state["stopping"].ask)

        def finish() -> int:
            if "code" not in state:
                ask()
                thread.join(600)
                assert runtime.stop(600)
            return state["code"]

        assert ready.wait(600)
        try:
            yield Server(url(listener), state["engine"], state["service"], finish, ask)
        finally:
            finish()

    return make


@pytest.fixture(scope="session")
def server(make_server: MakeServer) -> Iterator[Server]:
    """Return a server shared by the session; tests therefore compare counters before and after."""
    with make_server() as running:
        yield running


@pytest.fixture(scope="session")
def talking_target(make_target_folder: MakeTarget, once: Once) -> Path:
    return once("talking", partial(make_talking_target, make_target_folder))


@pytest.fixture(scope="session")
def talking(
    talking_target: Path, make_server: MakeServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Return one server per style of tool calls or reasoning, all with the same trained target."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for style in CALL:
            folder = style_folder(talking_target, style, tmp_path_factory.mktemp(style))
            servers[style] = stack.enter_context(make_server(target=folder, proposer="ngram"))
        yield servers


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.openai


@pytest.fixture(scope="session")
def plain_engine(tiny_target_folder: Path) -> Any:
    """Return an engine with the same target but no speculation and no server: the reference for every served output."""
    from infer.engine import Engine

    return Engine.load(
        ModelConfig(name=MODEL, path=str(tiny_target_folder), device="cpu"), proposer=ProposerConfig(name="none")
    )


@pytest.fixture(scope="session")
def walk(tiny_tokenizer: Tokenizer) -> Callable[..., tuple[str, bool]]:
    """Return a random text that a grammar allows, and whether the grammar came to its end."""
    import numpy as np

    from infer.batch.grammar import compile_matcher, make_tokenizer

    tokenizer = make_tokenizer(tiny_tokenizer.backend.to_str(), tiny_tokenizer.vocab_size, list(tiny_tokenizer.eos_ids))
    closing = np.zeros(tiny_tokenizer.vocab_size, dtype=bool)
    for text in '"}],':
        closing[tiny_tokenizer.encode(text, add_special_tokens=False)] = True

    def run(grammar: Any, seed: int, max_tokens: int = 1500) -> tuple[str, bool]:
        matcher = compile_matcher(grammar, tokenizer)
        chance, ids = random.Random(seed), []
        while not matcher.is_stopped() and len(ids) < max_tokens:
            bitmask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bitmask, bitorder="little")[: len(closing)].astype(bool)
            ending = allowed & closing
            choices = (ending if ending.any() and chance.random() < 0.5 else allowed).nonzero()[0]
            ids.append(int(chance.choice(choices)))
            assert matcher.try_consume_tokens([ids[-1]]), matcher.get_error()
        stop = [token for token in ids if token not in tiny_tokenizer.eos_ids]
        return tiny_tokenizer.decode(stop, with_special=True), matcher.is_stopped()

    return run
