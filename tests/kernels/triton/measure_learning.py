"""Measures what `learn=true` costs on a GPU: it needs the host's steps, since CUDA graphs show no hidden states, so
rounds with graphs are timed beside rounds without, and without and recorded. Run by `gpu_check.sh` alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.graphs import warm_up
from infer.learning.messages import Message, send
from infer.request import SamplingParams
from models.heads.weights import checkpoint_tensors
from tests.device import DEVICE, sized
from tests.kernels.triton import targets
from tests.kernels.triton.measure_engines import DTYPE, TOKENS, prefilled, rounds_of
from tests.kernels.triton.measure_scaling import prompts

if TYPE_CHECKING:
    from infer.learning.loop import LearningLoop

BATCHES = sized((1,), (1, 8, 64))
CHAIN = ProposerConfig(name="auto", adaptive=False, max_draft_tokens=3)
PROMPT = sized(4, 64)
random_head = partial(targets.random_head, draft_vocab_size=sized(100, 32000))
ARRIVES_S = 60.0  # within which a thread has read what was sent


@contextmanager
def learning(engine: Engine) -> Iterator[tuple[LearningLoop, socket.socket]]:
    """A server's learning without a process that trains; also the trainer's end of the socket."""
    from infer.learning.loop import LearningLoop

    ours, theirs = socket.socketpair()
    trainer: Any = SimpleNamespace(stream=ours, close=lambda: ours.shutdown(socket.SHUT_RDWR), why_ended=str)
    with ours, theirs:
        send(theirs, Message("status", {}, {}))
        loop = LearningLoop(engine, trainer)
        try:
            yield loop, theirs
        finally:
            loop.close()


@contextmanager
def made_engine() -> Iterator[Engine]:
    target = targets.random_target(sized("tiny", "llama3.1-8b"), DTYPE, DEVICE)
    config = EngineConfig(max_batch=max(BATCHES), max_tokens_in_cache=sized(128, 32768), graphs="on")
    with patch.object(warm_up, "compiles", lambda device: False):
        engine = Engine(target, head=random_head(target), config=config, proposer_config=CHAIN, probe=False)
        yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    pytest.importorskip("omegaconf")  # of which learning is configured
    with made_engine() as engine:
        yield engine


@pytest.mark.gpu(seconds=40)
def measure_refusal(engine: Engine, record_property: Callable[..., None]) -> None:
    """With graphs learning is refused, and says what to do."""
    if engine.config.graphs != "on":
        pytest.skip("a process before has left graphs")
    with pytest.raises(ValueError, match=r"learn=true: CUDA graphs .*; say engine\.graphs=off"), learning(engine):
        pass
    record_property("learning", {"graphs": "on", "refused": True})


@pytest.mark.gpu(seconds=5)
@pytest.mark.parametrize("requests", BATCHES)
@pytest.mark.parametrize("graphs", ["on", "off"])
def measure_recorded_rounds(engine: Engine, record_property: Callable[..., None], graphs: str, requests: int) -> None:
    texts = prompts(requests, PROMPT)
    if engine.config.graphs != graphs:
        engine.config.graphs = graphs
        engine.set_proposer("head")
    ids, numbers = rounds_of(engine, texts)
    line = {"graphs": graphs, "requests": requests, "served": numbers}
    if graphs == "off":
        with learning(engine) as (loop, _):
            recorded, line["recorded"] = rounds_of(engine, texts)
            loop.between_steps()
            line["examples"] = loop.status.examples
        assert recorded == ids
        assert line["examples"] >= requests
    record_property("learning", line)


@pytest.mark.gpu(seconds=15)
def measure_take_over(engine: Engine, record_property: Callable[..., None]) -> None:
    """A head arrives while requests run, and is taken over between two steps: the seconds of that, and no other ids."""
    if engine.config.graphs != "off":
        engine.config.graphs = "off"
        engine.set_proposer("head")
    texts = prompts(1, PROMPT)
    expected, _ = rounds_of(engine, texts)
    with learning(engine) as (loop, theirs):
        requests = prefilled(engine, texts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        made = checkpoint_tensors(random_head(engine.target)).items()
        tensors = {name: (x.float() if x.is_floating_point() else x).cpu() for name, x in made}  # as it is trained
        send(theirs, Message("candidate", tensors, {"number": "1", "tau_before": "1.0", "tau_after": "1.1"}))
        until, taken = time.monotonic() + ARRIVES_S, 0.0
        while not loop.status.taken_over and time.monotonic() < until:
            begin = time.perf_counter()
            loop.between_steps()
            taken = time.perf_counter() - begin
        while engine.has_work:
            engine.step()
        assert (loop.status.taken_over, loop.status.refused) == (1, 0)
    assert [request.output_ids for request in requests] == expected
    record_property("learning", {"taken_over_s": taken, "head_bytes": sum(t.nbytes for t in tensors.values())})
