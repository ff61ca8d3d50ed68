"""A simulated machine and its requests, which judge the controller: no clock, no model, every number by a seed.

The machine has true costs of steps, rows and drafts, with noise, stalls and drifts; requests have true acceptance
rates. `Simulation` drives a real `Speculator` with its planner through the calls of an engine's step and counts tokens
per simulated second. tests/judge_controller.py compares it with plain decoding and every fixed plan.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.batch.tree import Budget, VerifiedDraft
from infer.request import DrafterState, Needs, Phase, Proposer, ProposerState, Request, SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from infer.speculation.control.cost_model import CostModel, CostTable, Curve, guessed_cost_model
from infer.speculation.control.planner import Controller
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit, exit_rows
from infer.speculation.speculator import Speculator

PROMPT, WARM_UP = 64, 24  # tokens of a prompt, and that a head must see before it drafts
MAX_CHAIN = 5
CHAIN, TREE = Budget(MAX_CHAIN, MAX_CHAIN), Budget(16, 5)
# Tokens accepted by rank of a tree of 16 nodes, as a beam of SmolLM2's head has them.
RANKS = (0.56, 0.33, 0.2, 0.13, 0.12, 0.09, 0.07, 0.06, *[0.03] * 8)
PRIORS = (0.58, 0.59, 0.59, 0.6, 0.6)  # of SmolLM2's eagle3 head, measured in training


@dataclass(frozen=True)
class Machine:
    """True costs in milliseconds: of a step by its rows, of a draft by level and requests."""

    name: str
    step: float  # of no row
    row: float
    first: float  # first level of a draft
    level: float  # each further one
    request: float  # each further request, in a level
    free: int = 0  # rows that cost nothing
    read: float = 0.02  # a prompt's token, by the drafter
    prompt: float = 0.3  # the same, by the target
    context: float = 0.0  # what 1,000 tokens of context add to a row
    noise: float = 0.06
    beside: float = 0.0  # what a step with drafts takes beside its rows
    tracking: float = 0.05  # what keeping features adds to a plain step, as a share of one of one request
    after_drafts: float = 0.15  # what the first 25 ms of plain steps after drafts take longer
    after_plain: float = 0.4  # what the first 25 ms of steps with drafts after plain ones do

    def verify(self, batch: int, rows: int, context: float = PROMPT) -> float:
        rows_ms = self.row * (max(1, rows - self.free) + 0.1 * min(rows, self.free))
        return self.step + rows_ms + self.context * context / 1000 * rows + self.beside * (rows > batch)

    def drafting(self, counts: Sequence[int]) -> float:
        levels = [self.first, *[self.level] * MAX_CHAIN]
        return sum(seconds + self.request * (n - 1) for seconds, n in zip(levels, counts, strict=False) if n)


# Of SmolLM2-135M in bf16 and the 0.4 B target with their eagle3 heads on two cores, as their profiles have them; of the
# 11.5 M demo on one; and a GPU's shape, where rows are free up to a number and the host's calls count.
SMOLLM2 = Machine("smollm2", step=6.1, row=1.0, first=0.95, level=0.38, request=0.17)
WIDE = Machine("0.4 B", step=30.0, row=1.2, first=1.5, level=1.0, request=0.12, prompt=1.0)
DEMO = Machine("demo", step=1.5, row=0.06, first=0.95, level=0.65, request=0.06, prompt=0.05, after_drafts=0.4)
GPU = Machine("gpu", step=8.0, row=0.06, first=0.7, level=0.5, request=0.002, free=64, prompt=0.02, read=0.002)
MACHINES = (SMOLLM2, WIDE, DEMO, GPU)


@dataclass(frozen=True)
class Content:
    """Conditional acceptance rate of drafts, equal at every depth; `spread` over requests."""

    name: str
    rate: float
    temperature: float = 0.0
    spread: float = 0.08


CHAT, CODE = Content("chat", 0.44), Content("code", 0.56)
CHAT1, CODE1 = Content("chat T=1", 0.33, 1.0), Content("code T=1", 0.42, 1.0)
GOOD, USELESS = Content("good", 0.75), Content("useless", 0.04, spread=0.02)
MIXED = Content("mixed", 0.5, spread=0.35)
CONTENTS = (CHAT, CODE, CHAT1, CODE1, GOOD, USELESS)


@dataclass
class Since(ProposerState):
    tokens: int  # of the request when its drafter began to follow it

    def ready(self, request: Request) -> bool:
        return len(request.tokens) - self.tokens >= WARM_UP


class SimulatedDrafter(Proposer):
    """A head, as far as the speculator sees it: keeps features, must see some tokens before it drafts."""

    name, needs = "head", Needs(aux_layers=(1,), warm_up=WARM_UP)

    def begin(self, request: Request) -> Since:
        return Since(len(request.tokens) if request.drafter.state is DrafterState.PARTIAL else -WARM_UP)

    def places(self, budget: Budget) -> int:
        return budget.nodes


@dataclass
class Seen:
    """What a simulation saw."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)  # of each decoding request, by step
    planning: float = 0.0  # seconds of this host, in all

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def drafted(self) -> float:
        """Share of the steps in which anything was drafted."""
        return statistics.fmean(max(rows) > 1 for rows in self.rows)


class Simulation:
    """An engine of at most `batch` requests on a machine. Times are in seconds from here on.

    `machine`, `content` and `batch` may be changed between calls of `run`.
    """

    def __init__(
        self,
        machine: Machine,
        content: Content,
        batch: int,
        *,
        limit: Budget = CHAIN,
        default: str = "head",
        seed: int = 0,
        output: tuple[int, int] = (40, 88),
        prompt: int = PROMPT,
    ) -> None:
        self.machine, self.content, self.batch, self.output, self.prompt = machine, content, batch, output, prompt
        self.drafter = SimulatedDrafter()
        self.speculator = Speculator({"head": lambda: (self.drafter, limit)}, default, context=4096)
        self.confidence: Confidence | None = None
        self.split = True  # whether a step's drafting is timed apart, as it is not in overlapped rounds
        self.rng, self.requests, self.count = random.Random(seed), random.Random(seed + 1), 0
        self.running: list[Request] = []
        self.rates: dict[str, float] = {}
        self.now, self.alike, self.drafted = 0.0, 1.0, False  # time, that of steps of the last one's kind, and its kind
        self.seen = Seen()
        self.speed_of: Callable[[float], float] = lambda now: 1 + 0.08 * math.sin(now / 1.1)  # drift

    def run(self, tokens: int, seconds: float = math.inf) -> Seen:
        """Decode until so many tokens were emitted or so many seconds passed; return what was seen."""
        self.seen = seen = Seen()
        while seen.tokens < tokens and seen.seconds < seconds:
            self.step()
        return seen

    def _new(self) -> Request:
        self.count += 1
        name, length = str(self.count), self.requests.randint(*self.output)
        params = SamplingParams(max_tokens=length, temperature=self.content.temperature)
        self.rates[name] = min(0.97, max(0.0, self.requests.gauss(self.content.rate, self.content.spread)))
        request = Request(name, [1] * self.prompt, params, 0, [1] * self.prompt)
        self.speculator.assign(request)
        return request

    def step(self) -> None:
        spec, decoding = self.speculator, list(self.running)
        new = [self._new() for _ in range(max(0, self.batch - len(decoding)))]
        begin = time.perf_counter()
        load = len(decoding) + len(new)
        budgets = spec.track(decoding, spec.plan(decoding, load), new, load)
        spec.sync(new, [])
        self.seen.planning += time.perf_counter() - begin
        drafts, counts = self._draft(decoding, budgets)
        rows = sum(1 + draft.nodes for draft in drafts)
        step_s, drafting_s = self._seconds(decoding, rows, counts, new)
        begin = time.perf_counter()
        for request, draft in zip(decoding, drafts, strict=True):
            spec.verified(request, draft)
            emitted = min(1 + len(draft.path), request.remaining)
            request.tokens += [1] * emitted
            self.seen.tokens += emitted
            if request.remaining == 0:
                request.phase = Phase.FINISHED
                self.running.remove(request)
                spec.forget(request)
        for request in new:
            request.phase, request.computed = Phase.DECODE, len(request.prompt_ids)
            request.tokens.append(1)
            self.seen.tokens += 1
            self.running.append(request)
        if decoding and not new:
            spec.planner.record_step(len(decoding), rows, drafting_s if self.split else None, step_s)
        self.seen.planning += time.perf_counter() - begin
        self.seen.seconds += step_s
        self.now += step_s
        self.seen.steps += 1
        if decoding:
            self.seen.rows.append(tuple(1 + draft.nodes for draft in drafts))

    def _draft(self, decoding: Sequence[Request], budgets: Sequence[Budget]) -> tuple[list[VerifiedDraft], list[int]]:
        """Draw the outcome of each draft; return also how many requests took part in each level."""
        if any(budget.nodes and not budget.is_chain for budget in budgets):
            depth = max(budget.depth for budget in budgets)
            return [self._tree(*pair) for pair in zip(decoding, budgets, strict=True)], [
                sum(budget.nodes > 0 for budget in budgets)
            ] * depth
        depths = [0] * len(decoding)
        rates: list[list[float]] = [[] for _ in decoding]
        active = [b for b, budget in enumerate(budgets) if budget.nodes]
        scoring = self.confidence if self.confidence is not None and self.confidence.scoring else None
        limits = [budget.depth for budget in budgets]
        exits = None
        if scoring is not None and active:
            exits = EarlyExit(exit_rows(scoring, decoding, limits, max(limits)), limits)
        scores: list[list[float]] = [[] for _ in decoding]
        counts: list[int] = []
        while active:
            counts.append(len(active))
            for b in active:
                rate = self.rates[decoding[b].request_id]
                rates[b].append(self.rng.betavariate(1.5 * rate + 1e-3, 1.5 * (1 - rate) + 1e-3))
            kept = going = active
            if exits is not None:
                before, values = exits.chains.length, [rate[-1] if rate else 1.0 for rate in rates]
                log_probs = [math.log(max(value, 1e-6)) for value in values]
                exits.after(len(counts) - 1, log_probs)
                kept = [b for b in active if exits.chains.length[b] > before[b]]
                going = [b for b in active if exits.chains.active[b]]
                for b in kept:
                    scores[b].append(log_probs[b])
            for b in kept:
                depths[b] += 1
            active = [b for b in going if len(rates[b]) < budgets[b].depth]
        if exits is not None and scoring is not None:
            for request, limit, values in zip(decoding, limits, scores, strict=True):
                scoring.record(request, limit, values)
        drafts = []
        for budget, depth, rate in zip(budgets, depths, rates, strict=True):
            right = next((place for place in range(depth) if self.rng.random() > rate[place]), depth)
            drafts.append(VerifiedDraft(budget, depth, depth, range(1, right + 1)))
        return drafts, counts

    def _tree(self, request: Request, budget: Budget) -> VerifiedDraft:
        scale = self.rates[request.request_id] / CODE.rate
        path = [r + 1 for r, rate in enumerate(RANKS[: budget.nodes]) if self.rng.random() < scale * rate]
        return VerifiedDraft(budget, budget.nodes, budget.depth if budget.nodes else 0, path[: budget.depth])

    def _seconds(
        self, decoding: Sequence[Request], rows: int, counts: Sequence[int], new: Sequence[Request]
    ) -> tuple[float, float]:
        """Return the seconds of a step, and of its drafting."""
        machine, batch = self.machine, len(decoding)
        context = statistics.fmean(len(request.tokens) for request in decoding) if decoding else 0.0
        verify = machine.verify(batch, rows, context) if decoding or new else 0.0
        for request in new:
            read = machine.read * (request.drafter.state is not DrafterState.NONE and self.speculator.default != "none")
            verify += (machine.prompt + read) * len(request.prompt_ids)
        drafting = machine.drafting(counts)
        if self.drafted != (rows > batch):
            self.drafted, self.alike = rows > batch, 0.0
        cold = 1 + (machine.after_plain if self.drafted else machine.after_drafts) * (self.alike < 0.025)
        verify, drafting = cold * verify, cold * drafting
        if not self.drafted and self.speculator.wants_features(decoding):
            verify += machine.tracking * machine.verify(1, 1)
        slow = self.speed_of(self.now) * math.exp(self.rng.gauss(0.0, machine.noise))
        slow *= 4.0 if machine.noise and self.rng.random() < 0.005 else 1.0  # another process had the machine
        self.alike += 1e-3 * slow * (verify + drafting)
        return 1e-3 * slow * (verify + drafting), 1e-3 * slow * drafting


def profile_of(
    machine: Machine, limit: Budget, sizes: Sequence[int], slow: float = 1.0, noise: float = 0.04
) -> CostTable:
    """Return a profile of the machine, taken in an hour when it was `slow` times as slow."""
    rng = random.Random(5)
    widths = [1, 2, 3, 4, 6] if limit.is_chain else [1, 2, 3, 4, 6, 8, 12, 17]

    def curve(points: Sequence[tuple[int, float]]) -> Curve:
        seconds = (1e-3 * slow * ms * math.exp(rng.gauss(0.0, noise)) for _, ms in points)
        return Curve(tuple(float(size) for size, _ in points), tuple(seconds))

    steps = tuple(curve([(b * w, machine.verify(b, b * w) - machine.beside * (w > 1)) for w in widths]) for b in sizes)
    drafts = tuple(curve([(d, machine.drafting([b] * d)) for d in (1, 3, 5)]) for b in sizes)
    return CostTable(tuple(sizes), steps, {"head": drafts}, {"head": 1e-3 * slow * machine.read})


def controlled(
    machine: Machine,
    content: Content,
    batch: int,
    *,
    sizes: Sequence[int] | None = None,
    slow: float = 1.0,
    guess: bool = False,
    scored: bool = False,
    profiled: Machine | None = None,
    limit: Budget = CHAIN,
    **options: Any,
) -> Simulation:
    """Return a simulation under a controller with a profile of `profiled`, or with a guess of the costs.

    `scored`: chains may exit early. `sizes`: the batch sizes that the profile has.
    """
    simulation = Simulation(machine, content, batch, limit=limit, **options)
    acceptance = AcceptanceModel({"head": PRIORS})
    sizes = sizes or [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= max(4, batch)]
    costs = CostModel(profile_of(profiled or machine, limit, sizes, slow))
    simulation.confidence = Confidence(acceptance) if scored else None
    simulation.speculator.planner = Controller(
        guessed_cost_model({"head": limit}) if guess else costs, acceptance, simulation.confidence
    )
    return simulation


def references(
    machine: Machine, content: Content, batch: int, tokens: int, *, limit: Budget = CHAIN, **options: Any
) -> tuple[float, float]:
    """Return the speed of plain decoding, and the best of it and every fixed chain, or the whole tree."""
    plain = Simulation(machine, content, batch, default="none", **options).run(tokens).speed
    limits = [Budget(depth, depth) for depth in range(1, limit.depth + 1)] if limit.is_chain else [limit]
    fixed = (Simulation(machine, content, batch, limit=fixed, **options).run(tokens).speed for fixed in limits)
    return plain, max(plain, *fixed)
