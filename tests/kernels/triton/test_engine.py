"""The engine on the Triton kernels: token ids with drafts equal those without, in any batch, greedy and sampled; what
waits for a GPU in a round. A tiny target in the interpreter; on a GPU one of an 8B shape, the demo target, every head.
"""

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

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.graphs import warm_up
from infer.request import Completion, SamplingParams
from infer.settings.paths import REPO_ROOT
from models.heads import HEADS
from models.heads.files import load_head
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.device import BF16, DEVICE, FP32, ON_GPU, describe, orders, sized, variants_compiled
from tests.kernels.triton import targets
from tests.kernels.triton.measure_engines import TEXTS

GREEDY = SamplingParams(ignore_eos=True)
COOL = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
CUT = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=2, ignore_eos=True)
PENALIZED = replace(COOL, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, logit_bias={5: 1.0})
SAMPLINGS = {  # of the prompts, in turn
    "greedy": (GREEDY,),
    "T = 1, top-k, top-p": (CUT,),
    "T = 0.8": (COOL,),
    "plain, penalties, top-p, log-probabilities": (GREEDY, PENALIZED, CUT, replace(COOL, logprobs=3)),
}
CHAIN = ProposerConfig(name="auto", max_draft_tokens=4)
TREE = replace(CHAIN, tree="beam:3x4:12")
EXITING = replace(CHAIN, adaptive=True)
STARTED, OVERLAPPED, TOKENS = sized((3, 2, 20), (20, 200, 900))  # steps, rounds in which nothing may wait, tokens


class Way(NamedTuple):
    """A way of generating, compared with plain decoding without graphs, one prompt at a time."""

    label: str
    proposer: str
    shape: ProposerConfig
    together: bool  # all prompts at once
    graphs: str

    def __str__(self) -> str:
        return f"{self.label}, prompts {'together' if self.together else 'alone'}, graphs {self.graphs}"


# Those with the same graphs follow each other, so that each graph is recorded once. Trees come first: in graphs they
# have failed on a GPU, and were not seen there since (docs/log/2026-11.md).
WAYS = (
    Way("head, tree", "head", TREE, True, "on"),
    Way("none", "none", CHAIN, True, "on"),
    Way("head, chain", "head", CHAIN, True, "on"),
    Way("head, chain", "head", CHAIN, False, "on"),
    Way("head, adaptive chain", "head", EXITING, True, "on"),
    Way("n-gram", "ngram", CHAIN, True, "off"),
    Way("head, chain", "head", CHAIN, True, "off"),
    Way("head, tree", "head", TREE, True, "off"),
)
TREED, PLAINLY, CHAINED = WAYS[:3]
LOOKED_UP = next(way for way in WAYS if way.proposer == "ngram")
FIXED = tuple(way for way in WAYS if not way.shape.adaptive)  # adaptive drafts profile the costs of steps first
PLAIN = Way("none", "none", CHAIN, False, "off")


class Made(NamedTuple):
    engine: Engine
    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class Subject:
    """A target with a head. `make` takes the folder of an EAGLE-3 head of the demo target, if there is one, and whether
    the start-up probe runs; `making` and `seconds` are what that and a way take. `accepts`: the head is good enough
    that some drafts must be accepted. `drafts`: there is a head. `warms_up`: its engine compiles every kernel when it
    starts, as in serving.
    """

    make: Callable[[Path | None, bool], Made]
    making: float = 40
    seconds: float = 3
    samplings: Sequence[str] = tuple(SAMPLINGS)
    ways: Sequence[Way] = FIXED
    accepts: bool = True
    drafts: bool = True
    probe: bool = True
    warms_up: bool = False


def tiny(head: Path | None, probe: bool) -> Made:
    target = targets.random_target("tiny", FP32, DEVICE)
    config = EngineConfig(max_batch=2, max_tokens_in_cache=128, prefill_chunk=16, max_rows=32)
    engine = Engine(target, head=targets.taught_head(target), config=config, probe=probe)
    return Made(engine, [[5, 6, 7], [9, 8]], 3)


def large(head: Path | None, probe: bool) -> Made:
    target = targets.random_target("llama3.1-8b", BF16, DEVICE)
    config = EngineConfig(max_batch=4, max_tokens_in_cache=8192)
    engine = Engine(target, head=targets.random_head(target, 32000), config=config, probe=probe)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 128000, (n,), generator=generator).tolist() for n in (5, 64, 300)]
    return Made(engine, [*prompts, [11, 12, 13] * 20], 24)


def demo(dtype: torch.dtype, head: Path | None, probe: bool, *, kind: str | None = None, **options: Any) -> Made:
    """`kind`: of an untrained head, of whose drafts few are right, if any; without it `head`, or one of the target."""
    small = load_target(str(targets.DEMO))
    if kind is not None:
        drafter = targets.untaught_head(kind, small)
    else:
        drafter = targets.taught_head(small) if head is None else load_head(head, target=small)
    target = load_target(str(targets.DEMO), dtype=dtype, device=DEVICE)
    tokenizer = Tokenizer.load(target.folder)
    config = EngineConfig(max_batch=4, **options)
    engine = Engine(target, head=drafter, tokenizer=tokenizer, config=config, probe=probe)
    return Made(engine, [tokenizer.encode(text) for text in TEXTS], 48)


def hybrid(head: Path | None, probe: bool) -> Made:
    """Of which the host runs every step."""
    target = targets.random_hybrid(sized("tiny hybrid", "hybrid"), sized(FP32, BF16), DEVICE)
    config = EngineConfig(max_batch=4, max_tokens_in_cache=sized(256, 8192))
    engine = Engine(target, proposer="none", config=config, proposer_config=CHAIN, probe=probe)
    return Made(engine, [[5, 6, 7] * 2, [9, 8] * sized(2, 300)], sized(3, 48))


FEW = ("greedy", "T = 1, top-k, top-p")
UNTAUGHT = Subject(demo, 15, 2, FEW, [TREED, CHAINED], accepts=False, probe=False)
HYBRID = Subject(hybrid, 30, 3, FEW, [PLAINLY._replace(graphs="off"), LOOKED_UP], accepts=False, drafts=False)
SUBJECTS = sized(
    {
        "tiny hybrid": replace(HYBRID, samplings=("greedy",), probe=False),
        "tiny, fp32": Subject(tiny, samplings=("T = 0.8",), ways=[TREED, PLAINLY, CHAINED], probe=False),
    },
    {
        "8B shape, random, bf16": Subject(large, 60, accepts=False, warms_up=True),
        "demo, bf16": Subject(partial(demo, BF16), ways=WAYS),
        "hybrid, bf16": HYBRID,
        "demo, fp32": Subject(partial(demo, FP32)),
        "demo, int8, fp8 cache": Subject(partial(demo, BF16, weights="int8", kv_dtype="fp8"), samplings=FEW),
        **{f"demo, bf16, {kind}": replace(UNTAUGHT, make=partial(demo, BF16, kind=kind)) for kind in HEADS},
    },
)


@dataclass
class Running:
    """The engine of one subject, and what it generates without drafts."""

    name: str
    made: Made
    plain: dict[str, list[Completion]] = field(default_factory=dict)
    way: Way | None = None

    def draft(self, way: Way) -> None:
        key = way._replace(label="", together=True)
        if key != self.way:
            engine, self.way = self.made.engine, None
            engine.config.graphs = way.graphs
            engine.set_proposer(way.proposer, config=way.shape)
            self.way = key

    def params(self, sampling: str) -> list[SamplingParams]:
        kinds = SAMPLINGS[sampling]
        return [
            replace(kinds[index % len(kinds)], max_tokens=self.made.max_tokens)
            for index in range(len(self.made.prompts))
        ]

    def expected(self, sampling: str) -> list[Completion]:
        """Return the completions of plain decoding without graphs, one prompt at a time."""
        if sampling not in self.plain:
            self.draft(PLAIN)
            pairs = zip(self.made.prompts, self.params(sampling), strict=True)
            self.plain[sampling] = [self.made.engine.generate([prompt], params)[0] for prompt, params in pairs]
        return self.plain[sampling]


class Engines:
    """Holds one engine at a time. One that cannot be made is tried once."""

    def __init__(self, head: Path | None) -> None:
        self._head, self._running = head, None
        self._unmade: dict[str, str] = {}

    def start(self, name: str, *, probe: bool) -> Running:
        self.close()
        try:
            self._running = Running(name, SUBJECTS[name].make(self._head, probe))
        except Exception as error:
            self._unmade[name] = describe(error)
            raise
        self._unmade.pop(name, None)
        return self._running

    def of(self, name: str) -> Running:
        """Return the subject's engine; it is made anew in a process that took over after one which ended."""
        if self._running is not None and self._running.name == name:
            return self._running
        if name in self._unmade:
            pytest.skip(f"its engine could not be made: {self._unmade[name]}")
        return self.start(name, probe=False)

    def close(self) -> None:
        if self._running is not None:
            self._running.made.engine.close()
        self._running = None


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    head = orders(request.config).get("head")
    engines = Engines(head and Path(head))
    yield engines
    engines.close()


@pytest.fixture
def in_service(in_triton: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that do not warm up compile kernels when they need them."""
    if not SUBJECTS[request.node.callspec.params["subject"]].warms_up:
        monkeypatch.setattr(warm_up, "compiles", lambda device: False)


def marked(seconds: Callable[[Subject], float], subjects: dict[str, Subject] = SUBJECTS) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.gpu(seconds=seconds(one)), id=name) for name, one in subjects.items()]


@pytest.mark.gpu
@pytest.mark.parametrize("subject", marked(lambda one: one.making))
def test_the_engine_starts(in_service, engines, record_property, subject):
    """If it does not, it is made once more without the start-up probe, which is then what failed."""
    probe, failure = SUBJECTS[subject].probe, ""
    try:
        running = engines.start(subject, probe=probe)
    except Exception as error:
        if not probe:
            raise
        traceback.print_exc()
        failure = f"the engine was made without its start-up probe; with it: {describe(error)}"
        running = engines.start(subject, probe=False)
    engine = running.made.engine
    cache_tokens = engine.memory.pages * engine.config.page_size
    line = {"target": subject, "cache_tokens": cache_tokens, "sizes": str(engine.sizes)}
    record_property("engines", line | ({"ok": False, "why": failure} if failure else {}))
    assert not failure


CASES = [
    pytest.param(name, way, sampling, marks=pytest.mark.gpu(seconds=one.seconds), id=f"{name}, {way}, {sampling}")
    for name, one in SUBJECTS.items()
    for way in one.ways
    for sampling in one.samplings
]


@pytest.mark.gpu
@pytest.mark.parametrize(("subject", "way", "sampling"), CASES)
def test_drafts_change_no_token(in_service, engines, record_property, subject, way, sampling):
    running, one = engines.of(subject), SUBJECTS[subject]
    engine, prompts, _ = running.made
    expected, params = running.expected(sampling), running.params(sampling)
    running.draft(way)
    batches = [range(len(prompts))] if way.together else [[index] for index in range(len(prompts))]
    completions = []
    with variants_compiled() as compiled:
        for batch in batches:
            completions += engine.generate([prompts[i] for i in batch], [params[i] for i in batch])
    different = sum(a.token_ids != e.token_ids for a, e in zip(completions, expected, strict=True))
    accepted = sum(completion.stats.accepted for completion in completions)
    line = {"target": subject, "sampling": sampling, "drafts": way.label, "batch": len(batches[0])}
    line |= {"graphs": way.graphs, "prompts": len(prompts), "different": different, "accepted_drafts": accepted}
    line["proposer_failures"] = failures = engine.stats.proposer_failures
    if one.warms_up:  # while serving, although the engine has started
        line["compiled"] = sorted({variant.split()[0] for variant in compiled})
    # adaptive drafting may not draft at all
    lost = one.accepts and way.proposer != "none" and not way.shape.adaptive and not accepted
    record_property("exact", line | {"ok": not (different or failures or lost)})
    assert not different, f"{different} of {len(prompts)} prompts have other token ids"
    assert not failures, f"drafting failed in {failures} requests, which went on without"
    assert not lost, "no drafted token was accepted"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "subject", marked(lambda one: 2 * one.seconds, {name: one for name, one in SUBJECTS.items() if one.drafts})
)
def test_nothing_waits_in_rounds_that_run_ahead(in_service, engines, record_property, subject):
    """But the reading of results."""
    running, done = engines.of(subject), 0
    engine, prompts, _ = running.made
    running.draft(CHAINED)
    ids = [engine.add(prompt[-16:], replace(GREEDY, max_tokens=TOKENS)) for prompt in prompts]
    for _ in range(STARTED):
        engine.step()
    with counted_waits() as waits:
        while engine.has_work and done < OVERLAPPED:
            engine.step()
            done += 1
    for request_id in ids:
        engine.abort(request_id)
    line = {"target": subject, "drafts": CHAINED.label, "rounds": done, "waits": dict(waits), "ok": not waits}
    record_property("waits", line)
    assert done
    assert not waits, f"the host waited for the GPU at {', '.join(waits)}"


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count what synchronises with the GPU inside the block, by file and line; nothing on a CPU."""
    counts = Counter[str]()
    if not ON_GPU:
        yield counts
        return

    def count(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):  # torch says first that the mode is a prototype
            return
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(REPO_ROOT)]
        inner = [
            f for f in frames if Path(f.filename).relative_to(REPO_ROOT).parts[0] in ("infer", "kernels", "models")
        ]
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
