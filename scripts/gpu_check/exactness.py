"""Checks on this machine that token ids with drafts equal those without, in any batch, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import Completion, SamplingParams
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets
from scripts.gpu_check.plan import Check, Group, Lines

TEXTS = (
    "import os\n\ndef main():",
    "class Error(Exception):\n",
    "    def __init__(self, name, value):\n        self.name = name\n        self.",
    "for index in range(10):\n    print(index)\nfor index in range(10):\n    ",
)
GREEDY = SamplingParams(ignore_eos=True)
COOL = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
CUT = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=2, ignore_eos=True)
SAMPLINGS = {"greedy": GREEDY, "T = 1, top-k, top-p": CUT, "T = 0.8": COOL}
CHAIN = ProposerConfig(name="auto", max_draft_tokens=4)
TREE = replace(CHAIN, tree="beam:3x4:12")


class Way(NamedTuple):
    """A way of generating, compared with plain decoding without graphs, one prompt at a time."""

    label: str
    proposer: str
    shape: ProposerConfig
    together: bool  # all prompts at once
    graphs: str  # see `use_graphs`


WAYS = (
    Way("none", "none", CHAIN, True, "on"),
    Way("head, chain", "head", CHAIN, True, "on"),
    Way("head, tree", "head", TREE, True, "on"),
    Way("head, chain", "head", CHAIN, False, "on"),
    Way("n-gram", "ngram", CHAIN, True, "off"),
    Way("head, chain", "head", CHAIN, True, "off"),
    Way("head, tree", "head", TREE, True, "off"),
)


class Made(NamedTuple):
    engine: Engine
    prompts: list[list[int]]
    max_tokens: int


@dataclass
class Subject:
    """A target with a head: its engine, made when it is first needed, and what that generates without drafts."""

    name: str
    make: Callable[[], Made]
    _made: Made | None = None
    _plain: dict[str, list[Completion]] = field(default_factory=dict)

    def group(self, making: float, way_seconds: float, samplings: Sequence[str], ways: Sequence[Way]) -> Group:
        """Return a check for every sampling and way; `making` and `way_seconds` are the seconds of each on a GPU."""
        checks = [
            Check(self.label(kind, way), ("exact",), way_seconds, partial(self.compare, kind, way))
            for kind in samplings
            for way in ways
        ]
        checks[0] = replace(checks[0], seconds=making + way_seconds)
        return Group(checks, self.close)

    def label(self, kind: str, way: Way) -> str:
        prompts = "together" if way.together else "alone"
        return f"exact: {self.name}, {kind}, {way.label}, prompts {prompts}, graphs {way.graphs}"

    def compare(self, kind: str, way: Way) -> Lines:
        engine, prompts, max_tokens = self.made()
        params = replace(SAMPLINGS[kind], max_tokens=max_tokens)
        if kind not in self._plain:
            use_graphs(engine, "off")
            engine.set_proposer("none")
            self._plain[kind] = [engine.generate([prompt], params)[0] for prompt in prompts]
        use_graphs(engine, way.graphs)
        engine.set_proposer(way.proposer, config=way.shape)
        batches = [prompts] if way.together else [[prompt] for prompt in prompts]
        completions = [completion for batch in batches for completion in engine.generate(batch, params)]
        facts = {"target": self.name, "sampling": kind, "drafts": way.label, "batch": len(batches[0])}
        return [facts | {"graphs": way.graphs} | difference(self._plain[kind], completions)]

    def made(self) -> Made:
        if self._made is None:
            self._made = self.make()
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.engine.close()
        self._made = None


def groups(device: torch.device) -> list[Group]:
    """Return a group for each target; on a CPU a tiny case, because Triton's interpreter is slow."""
    if device.type != "cuda":
        ways = [way for way in WAYS if way.graphs == "on" and way.together]
        return [Subject("tiny, fp32", partial(tiny, device)).group(0, 1, ("T = 0.8",), ways)]
    # An 8B target is made, packed and probed, and its kernels are compiled, in 40 seconds.
    return [
        Subject("8B shape, random, bf16", partial(large, device)).group(40, 5, tuple(SAMPLINGS), WAYS),
        Subject("demo, bf16", partial(demo, torch.bfloat16, device)).group(20, 3, tuple(SAMPLINGS), WAYS),
        Subject("demo, fp32", partial(demo, torch.float32, device)).group(20, 3, tuple(SAMPLINGS), WAYS),
    ]


def tiny(device: torch.device) -> Made:
    target = targets.random_target("tiny", torch.float32, device)
    config = EngineConfig(max_batch=2, max_tokens_in_cache=128, prefill_chunk=16, max_rows=32)
    # The start-up probe would take minutes.
    engine = Engine(target, head=targets.taught_head(target), config=config, probe=False)
    return Made(engine, [[5, 6, 7], [9, 8]], 3)


def large(device: torch.device) -> Made:
    target = targets.random_target("llama3.1-8b", torch.bfloat16, device)
    config = EngineConfig(max_batch=4, max_tokens_in_cache=8192)
    engine = Engine(target, head=targets.random_head(target, 32000), config=config)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 128000, (n,), generator=generator).tolist() for n in (5, 64, 300)]
    return Made(engine, [*prompts, [11, 12, 13] * 20], 24)


def demo(dtype: torch.dtype, device: torch.device) -> Made:
    target = load_target(str(targets.DEMO), dtype=dtype, device=device)
    head = targets.taught_head(load_target(str(targets.DEMO)))
    tokenizer = Tokenizer.load(target.folder)
    engine = Engine(target, head=head, tokenizer=tokenizer, config=EngineConfig(max_batch=4))
    return Made(engine, [tokenizer.encode(text) for text in TEXTS], 48)


def use_graphs(engine: Engine, mode: str) -> None:
    """Set CUDA graphs from the next `set_proposer` on: "off" or "on"."""
    engine.config.graphs = mode


def difference(plain: Sequence[Completion], completions: Sequence[Completion]) -> dict[str, Any]:
    wrong = sum(actual.token_ids != expected.token_ids for actual, expected in zip(completions, plain, strict=True))
    accepted = sum(completion.stats.accepted for completion in completions)
    return {"prompts": len(plain), "different": wrong, "accepted_drafts": accepted, "ok": wrong == 0}
