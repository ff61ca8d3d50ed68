"""Checks on this machine that token ids with drafts equal those without, in any batch, greedy and sampled."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.options.paths import REPO_ROOT
from infer.request import Completion, SamplingParams
from models.heads import HEADS
from models.heads.base import Head
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from scripts.gpu_check import targets
from scripts.gpu_check.compiling import describe, variants_compiled
from scripts.gpu_check.plan import Check, Group, LeftOut, Lines

TEXTS = (
    "import os\n\ndef main():",
    "class Error(Exception):\n",
    "    def __init__(self, name, value):\n        self.name = name\n        self.",
    "for index in range(10):\n    print(index)\nfor index in range(10):\n    ",
)
GREEDY = SamplingParams(ignore_eos=True)
COOL = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
CUT = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=2, ignore_eos=True)
PENALISED = replace(COOL, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, logit_bias={5: 1.0})
SAMPLINGS = {  # of the prompts, in turn
    "greedy": (GREEDY,),
    "T = 1, top-k, top-p": (CUT,),
    "T = 0.8": (COOL,),
    "plain, penalties, top-p, log-probabilities": (GREEDY, PENALISED, CUT, replace(COOL, logprobs=3)),
}
CHAIN = ProposerConfig(name="auto", max_draft_tokens=4)
TREE = replace(CHAIN, tree="beam:3x4:12")
EXITING = replace(CHAIN, adaptive=True)
OVERLAPPED = 200  # rounds in which nothing may wait for the GPU but the reading of results
STARTED = 20  # steps after which prompts are prefilled and rounds run ahead


class Way(NamedTuple):
    """A way of generating, compared with plain decoding without graphs, one prompt at a time."""

    label: str
    proposer: str
    shape: ProposerConfig
    together: bool  # all prompts at once
    graphs: str  # see `use_graphs`


# Those with the same graphs follow each other, so that each graph is recorded once.
WAYS = (
    Way("none", "none", CHAIN, True, "on"),
    Way("head, chain", "head", CHAIN, True, "on"),
    Way("head, chain", "head", CHAIN, False, "on"),
    Way("head, tree", "head", TREE, True, "on"),
    Way("head, adaptive chain", "head", EXITING, True, "on"),
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
    """A target with a head: its engine, made by the first check, and what that generates without drafts.

    `make` takes whether the start-up probe runs. `accepts`: the head is good enough that some drafts must be accepted.
    """

    name: str
    make: Callable[[bool], Made]
    accepts: bool = True
    probe: bool = True
    warms_up: bool = False
    _made: Made | None = None
    _unmade: Exception | None = None
    _plain: dict[str, list[Completion]] = field(default_factory=dict)
    _way: Way | None = None

    def group(self, making: float, seconds: float, samplings: Sequence[str], ways: Sequence[Way]) -> Group:
        """Return checks of making the engine, and of every way and sampling; `making` and `seconds` those of each."""
        first = Check(f"exact: {self.name}, engine", ("engines",), making, self.set_up)
        checks = [
            Check(self.label(kind, way), ("exact",), seconds, partial(self.compare, kind, way), needs=first.label)
            for way in ways
            for kind in samplings
        ]
        overlapped = [way for way in ways if way.proposer == "head" and way.graphs == "on" and way.together][:1]
        for way in overlapped:
            label = f"exact: {self.name}, waits in overlapped rounds, {way.label}"
            checks.append(Check(label, ("waits",), 2 * seconds, partial(self.waits, way), needs=first.label))
        return Group(f"exact, {self.name}", "exact", [first, *checks], self.close, warms_up=self.warms_up)

    def label(self, kind: str, way: Way) -> str:
        prompts = "together" if way.together else "alone"
        return f"exact: {self.name}, {way.label}, prompts {prompts}, graphs {way.graphs}, {kind}"

    def set_up(self) -> Lines:
        """Make the engine; if that raises, once more without the start-up probe, which is then what failed."""
        line: dict[str, Any] = {"target": self.name}
        try:
            self._made = self.make(self.probe)
        except Exception as error:
            if not self.probe:
                raise
            traceback.print_exc()
            self._made = self.make(False)
            line |= {"ok": False, "why": f"the engine was made without its start-up probe; with it: {describe(error)}"}
        engine = self._made.engine
        return [line | {"cache_tokens": engine.memory.pages * engine.config.page_size, "sizes": str(engine.sizes)}]

    def compare(self, kind: str, way: Way) -> Lines:
        engine, prompts, _ = self.made()
        expected = self.plain(kind)
        self.draft(way)
        params = self.params(kind)
        batches = [range(len(prompts))] if way.together else [[index] for index in range(len(prompts))]
        completions = list[Completion]()
        with variants_compiled() as compiled:
            for batch in batches:
                completions += engine.generate([prompts[i] for i in batch], [params[i] for i in batch])
        facts: dict[str, Any] = {"target": self.name, "sampling": kind, "drafts": way.label, "batch": len(batches[0])}
        line: dict[str, Any] = facts | {"graphs": way.graphs} | difference(expected, completions)
        line["proposer_failures"] = engine.stats.proposer_failures
        if self.warms_up:  # while serving, although the engine has started
            line["compiled"] = sorted({variant.split()[0] for variant in compiled})
        must_accept = self.accepts and way.proposer != "none" and not way.shape.adaptive  # which may not draft at all
        drafted = line["accepted_drafts"] > 0 or not must_accept
        return [line | {"ok": line["ok"] and drafted and not line["proposer_failures"]}]

    def params(self, kind: str) -> list[SamplingParams]:
        _, prompts, max_tokens = self.made()
        kinds = SAMPLINGS[kind]
        return [replace(kinds[i % len(kinds)], max_tokens=max_tokens) for i in range(len(prompts))]

    def plain(self, kind: str) -> list[Completion]:
        """Return the completions of plain decoding without graphs, one prompt at a time."""
        if kind not in self._plain:
            engine, prompts, _ = self.made()
            self.draft(Way("none", "none", CHAIN, False, "off"))
            pairs = zip(prompts, self.params(kind), strict=True)
            self._plain[kind] = [engine.generate([prompt], params)[0] for prompt, params in pairs]
        return self._plain[kind]

    def draft(self, way: Way) -> None:
        key = way._replace(label="", together=True)
        if key != self._way:
            engine, self._way = self.made().engine, None
            use_graphs(engine, way.graphs)
            engine.set_proposer(way.proposer, config=way.shape)
            self._way = key

    def waits(self, way: Way) -> Lines:
        """Count by source line what waits for the GPU in rounds that run ahead, but for the reading of results."""
        engine, prompts, _ = self.made()
        self.draft(way)
        started, rounds = (STARTED, OVERLAPPED) if engine.device.type == "cuda" else (3, 2)
        params = replace(GREEDY, max_tokens=min(900, 6 * (started + rounds)) if engine.device.type == "cuda" else 20)
        ids, done = [engine.add(prompt[-16:], params) for prompt in prompts], 0
        for _ in range(started):
            engine.step()
        with counted_waits(engine.device) as waits:
            while engine.has_work and done < rounds:
                engine.step()
                done += 1
        for request_id in ids:
            engine.abort(request_id)
        line = {"target": self.name, "drafts": way.label, "rounds": done, "waits": dict(waits), "ok": not waits}
        return [line | ({"why": f"the host waited for the GPU at {', '.join(waits)}"} if waits else {})]

    def made(self) -> Made:
        """Return the engine; it is made anew in a process that took over after one which ended."""
        if self._unmade is not None:
            raise LeftOut(f"the engine could not be made again: {describe(self._unmade)}")
        if self._made is None:
            try:
                self._made = self.make(False)
            except Exception as error:
                self._unmade = error
                raise
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.engine.close()
        self._made = None


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Count what synchronises with the GPU inside the block, by file and line; nothing on a CPU."""
    counts = Counter[str]()
    if device.type != "cuda":
        yield counts
        return

    def count(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):  # torch says first that the mode is a prototype
            return
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(REPO_ROOT)]
        inner = [f for f in frames if "gpu_check" not in f.filename]
        frame = (inner or frames)[-1]
        counts[f"{Path(frame.filename).relative_to(REPO_ROOT)}:{frame.lineno} {frame.line}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")


def groups(device: torch.device, head: Path | None) -> list[Group]:
    """Return a group for each target; on a CPU a tiny case, because Triton's interpreter is slow.

    `head`: the folder of a trained head of the demo target; without it drafts are those of one made of the target.
    """
    if device.type != "cuda":
        ways = [way for way in WAYS if way.graphs == "on" and way.together and not way.shape.adaptive]
        subject = Subject("tiny, fp32", partial(tiny, device), probe=False)  # the probe would take minutes
        return [subject.group(0, 1, ("T = 0.8",), ways)]
    # An 8B target is made, packed and probed, and its kernels are compiled, in 40 seconds.
    every, few = tuple(SAMPLINGS), ("greedy", "T = 1, top-k, top-p")
    narrow = EngineConfig(max_batch=4, weights="int8", kv_dtype="fp8")
    wide = EngineConfig(max_batch=4)
    ways = [*WAYS[:4], *WAYS[5:]]  # without adaptive drafts, which profile the costs of steps first
    random = Subject("8B shape, random, bf16", partial(large, device), accepts=False, warms_up=True)
    targets_checked = [
        random.group(60, 3, every, ways),
        Subject("demo, bf16", partial(demo, torch.bfloat16, device, wide, head)).group(40, 3, every, WAYS),
        Subject("demo, fp32", partial(demo, torch.float32, device, wide, head)).group(40, 3, every, ways),
        Subject("demo, int8, fp8 cache", partial(demo, torch.bfloat16, device, narrow, head)).group(40, 3, few, ways),
    ]
    halves = [list(HEADS)[::2], list(HEADS)[1::2]]
    heads = [[check for kind in half for check in one_head(kind, device)] for half in halves]
    names = [f"exact, {', '.join(half)}" for half in halves]
    return [*targets_checked, *(Group(name, "exact", checks) for name, checks in zip(names, heads, strict=True))]


def one_head(kind: str, device: torch.device) -> list[Check]:
    """Return checks of the demo target with an untrained head of a kind; few of its drafts are right, if any."""
    subject = Subject(f"demo, bf16, {kind}", partial(headed, kind, device), accepts=False, probe=False)
    ways = [Way("head, chain", "head", CHAIN, True, "on"), Way("head, tree", "head", TREE, True, "on")]
    group = subject.group(15, 2, ("greedy", "T = 1, top-k, top-p"), ways)
    last = group.checks[-1]

    def run() -> Lines:
        lines = last.run()
        subject.close()
        return lines

    return [*group.checks[:-1], replace(last, run=run)]


def tiny(device: torch.device, probe: bool) -> Made:
    target = targets.random_target("tiny", torch.float32, device)
    config = EngineConfig(max_batch=2, max_tokens_in_cache=128, prefill_chunk=16, max_rows=32)
    engine = Engine(target, head=targets.taught_head(target), config=config, probe=probe)
    return Made(engine, [[5, 6, 7], [9, 8]], 3)


def large(device: torch.device, probe: bool) -> Made:
    target = targets.random_target("llama3.1-8b", torch.bfloat16, device)
    config = EngineConfig(max_batch=4, max_tokens_in_cache=8192)
    engine = Engine(target, head=targets.random_head(target, 32000), config=config, probe=probe)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 128000, (n,), generator=generator).tolist() for n in (5, 64, 300)]
    return Made(engine, [*prompts, [11, 12, 13] * 20], 24)


def demo(dtype: torch.dtype, device: torch.device, config: EngineConfig, folder: Path | None, probe: bool) -> Made:
    small = load_target(str(targets.DEMO))
    head = targets.taught_head(small) if folder is None else load_head(folder, target=small)
    return made_of_demo(dtype, device, config, probe, head)


def headed(kind: str, device: torch.device, probe: bool) -> Made:
    head = targets.untaught_head(kind, load_target(str(targets.DEMO)))
    return made_of_demo(torch.bfloat16, device, EngineConfig(max_batch=4), probe, head)


def made_of_demo(dtype: torch.dtype, device: torch.device, config: EngineConfig, probe: bool, head: Head) -> Made:
    target = load_target(str(targets.DEMO), dtype=dtype, device=device)
    tokenizer = Tokenizer.load(target.folder)
    engine = Engine(target, head=head, tokenizer=tokenizer, config=config, probe=probe)
    return Made(engine, [tokenizer.encode(text) for text in TEXTS], 48)


def use_graphs(engine: Engine, mode: str) -> None:
    """Set CUDA graphs from the next `set_proposer` on: "off" or "on"."""
    engine.config.graphs = mode


def difference(plain: Sequence[Completion], completions: Sequence[Completion]) -> dict[str, Any]:
    wrong = sum(actual.token_ids != expected.token_ids for actual, expected in zip(completions, plain, strict=True))
    accepted = sum(completion.stats.accepted for completion in completions)
    return {"prompts": len(plain), "different": wrong, "accepted_drafts": accepted, "ok": wrong == 0}
