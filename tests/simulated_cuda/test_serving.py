"""The engine on a simulated device: exact tokens, another device than the first, and the product's own faults."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.graphs.step_graph import StepGraphs
from infer.learning.loop import LearningLoop
from infer.learning.messages import Message, send
from infer.request import SamplingParams
from infer.speculation.proposers.draft_loops.base import RecurrentLoop
from models.heads.weights import checkpoint_tensors
from models.targets import load_target
from tests.heads import make_head
from tests.lossless.plain import ids
from tests.server.harness import wait_until
from tests.simulated_cuda.install import simulated_cuda
from tests.simulated_cuda.machine import CaptureError, DeviceMix, HostRace, Machine
from tests.simulated_cuda.matrix import BEAM, DRAFTERS, EAGLE3, Drafter
from tests.simulated_cuda.serving import CONTROL, SIZES, make_engine, serve

PROMPT = [5, 6, 7, 5]
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
GREEDY, SAMPLED = SamplingParams(**SHORT), SamplingParams(temperature=0.8, top_p=0.9, seed=3, **SHORT)


@pytest.mark.slow
def test_tokens_are_those_of_the_cpu(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels computed, graphs replayed from what was recorded, memory of other graphs spoiled: the same ids."""
    with monkeypatch.context() as patch:
        patch.setenv("HEADWAY_KERNELS", "triton")  # on the CPU as well
        plain = Engine(load_target(str(target_folder)), proposer="none", config=EngineConfig(**SIZES), probe=False)
        expected = ids(plain.generate([PROMPT] * 2, [GREEDY, SAMPLED]))
    for drafter, graphs in ((Drafter("head", EAGLE3), "on"), (Drafter("head", EAGLE3, BEAM), "off")):
        with simulated_cuda():
            engine = make_engine(target_folder, drafter, graphs=graphs, max_batch=1)
            assert ids(engine.generate([PROMPT] * 2, [GREEDY, SAMPLED])) == expected
            assert engine.stats.proposer_failures == 0
            assert engine.stats.speculation.drafted > 0


@pytest.mark.slow
def test_what_is_captured_leaves_numbers_in_the_cache(target_folder: Path) -> None:
    """Requests that have ended read the null block in rounds; keys that are no numbers would spoil their drafts."""
    with simulated_cuda():
        engine = make_engine(target_folder, Drafter("head", EAGLE3, BEAM), graphs="on", max_batch=1)
        assert engine.graphs is not None
        assert all(cache.cpu().isfinite().all() for cache in engine._pool.layers.caches)


def test_how_much_is_captured(cuda: Machine, target_folder: Path) -> None:
    """At the defaults of a head with adaptive drafts, as the device counts captures."""
    defaults: dict[str, Any] = {"max_batch": EngineConfig().max_batch, "max_rows": 512}
    engine = make_engine(target_folder, DRAFTERS["eagle3, adaptive"], graphs="on", profile=False, **defaults)
    assert engine.graphs is not None
    assert engine.graphs.count == sum(map(len, cuda.pools.values())) == 30


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0"])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_every_device_serves(cuda: Machine, target_folder: Path, device: str, graphs: str) -> None:
    """Loaded as by a command; everything is on its device, which is the current one for kernels and events."""
    engine = Engine.load(
        ModelConfig(name="tiny", path=str(target_folder), device=device),
        engine=EngineConfig(**SIZES, graphs=graphs),
        proposer=ProposerConfig(name="ngram"),
    )
    serve(engine, cuda, replace(GREEDY, max_tokens=12))
    serve(engine, cuda, replace(SAMPLED, logprobs=2, prompt_logprobs=1, presence_penalty=0.5))
    engine.set_proposer("none")  # whose steps are captured
    serve(engine, cuda, SAMPLED)


def test_a_head_learns_without_graphs(cuda: Machine, target_folder: Path) -> None:
    """Examples and candidates lie on the host, and what is computed and served on the device."""
    ours, theirs = socket.socketpair()
    trainer: Any = SimpleNamespace(stream=ours, close=lambda: ours.shutdown(socket.SHUT_RDWR), why_ended=str)
    with ours, theirs:
        with pytest.raises(ValueError, match=r"learn=true: CUDA graphs .*; say engine\.graphs=off"):
            LearningLoop(make_engine(target_folder, DRAFTERS["eagle3"], graphs="on"), trainer)
        engine = make_engine(target_folder, DRAFTERS["eagle3"], graphs="off")
        send(theirs, Message("status", {}, {}))
        learning = LearningLoop(engine, trainer)
        serve(engine, cuda, GREEDY)
        learning.between_steps()
        assert learning.status.examples == 2
        head = make_head(load_target(str(target_folder)), EAGLE3)
        facts = {"number": "1", "tau_before": "1.0", "tau_after": "1.1"}
        send(theirs, Message("candidate", checkpoint_tensors(head), facts))
        wait_until(lambda: not learning._inbox.empty())
        learning.between_steps()
        assert (learning.status.taken_over, learning.status.refused) == (1, 0)
        serve(engine, cuda, GREEDY)
        learning.close()


# ---- planted faults of the product -----------------------------------------------------------------------------------


def test_a_head_on_another_device_is_found(cuda: Machine, target_folder: Path) -> None:
    engine = make_engine(target_folder, DRAFTERS["eagle3"])
    engine._head.module.to("cuda:1")  # type: ignore[union-attr]
    with pytest.raises(DeviceMix):
        serve(engine, cuda, GREEDY)


def test_a_kernel_on_another_than_the_current_device_is_found(cuda: Machine, target_folder: Path) -> None:
    engine = make_engine(target_folder, DRAFTERS["none"])
    torch.cuda.set_device(1)
    with pytest.raises(DeviceMix, match="the current device is cuda:1"):
        serve(engine, cuda, GREEDY)


@pytest.mark.parametrize(
    "fault",
    [
        lambda roots: roots.sum().item(),
        lambda roots: torch.tensor([1], device=roots.device),
        lambda roots: roots[roots > 0],
    ],
    ids=["a read", "an upload", "a size that only the device knows"],
)
def test_a_wait_in_a_capture_is_found(
    cuda: Machine, target_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    original = RecurrentLoop.chain

    def chain(self: Any, unread: Any, *rest: Any) -> Any:
        fault(unread.root)
        return original(self, unread, *rest)

    monkeypatch.setattr(RecurrentLoop, "chain", chain)
    with pytest.raises(CaptureError):
        make_engine(target_folder, DRAFTERS["eagle3"], graphs="on")


def test_a_new_wait_in_a_step_is_counted(cuda: Machine, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target_folder, DRAFTERS["none"], graphs="off")
    before = serve(engine, cuda, GREEDY)["decode"]
    original = type(engine.target).logits
    monkeypatch.setattr(type(engine.target), "logits", lambda self, x: original(self, x * x.sum().item()))
    after = serve(engine, cuda, GREEDY)["decode"]
    assert sum((after - before).values()) == 1
    assert {wait.kind for wait in after - before} == {"read"}


def test_results_that_were_not_waited_for_are_found(
    cuda: Machine, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(target_folder, DRAFTERS["eagle3"], graphs="on")
    original = StepGraphs.launch
    monkeypatch.setattr(StepGraphs, "launch", lambda self: original(self)._replace(arrived=None))
    with pytest.raises(HostRace):
        serve(engine, cuda, GREEDY)


def test_a_value_taken_at_capture_stays_in_the_graph(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph repeats what was launched: a number that Python has since changed is not read again."""
    with simulated_cuda(computed=CONTROL):
        x, factor = torch.ones(3, device="cuda"), [2]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            y = x * factor[0]
        factor[0] = 5
        x.fill_(10)
        graph.replay()
        assert y.tolist() == [20, 20, 20]
