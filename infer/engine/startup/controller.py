"""Makes an engine's controller; step costs on this machine are measured once and stored in the user's cache folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from infer.batch.tree import Budget
from infer.engine.startup.profiled_engine import ProfiledEngine
from infer.engine.startup.profiler import Unmeasured, kept_table, measure
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from infer.speculation.control.cost_model import CostModel, CostTable, guessed_cost_model
from infer.speculation.control.planner import Controller
from infer.speculation.proposers import SELF_LIMITING, Maker
from infer.speculation.proposers.head import HeadProposer
from infer.steps.serving import Serving
from kernels.cpu.library import flags, processor

COSTLY = ("head", "draft_model")  # drafters that run a model; any other is measured only if it is the default


@dataclass
class ControllerState:
    """What drafts and steps have taught; kept while the head stays the same, whatever else changes about drafting."""

    acceptance: AcceptanceModel
    costs: dict[str, CostModel] = field(default_factory=dict[str, CostModel])  # by the configuration that was measured
    profile_due: bool = False  # the costs in use are guesses because nothing was measured yet
    confidence: Confidence = field(init=False)

    def __post_init__(self) -> None:
        self.confidence = Confidence(self.acceptance)


def make_controller(
    engine: Serving,
    proposers: Mapping[str, Maker],
    state: ControllerState,
    head: HeadProposer | None,
    timer: Callable[[], float] = time.perf_counter,
    *,
    profile: bool = True,
    check: Callable[[], None] | None = None,
) -> Controller:
    """Return a controller for the engine with these proposers.

    The first time, profiling takes seconds of `timer`. If it fails, or without `profile` if no earlier start has stored
    a table, the controller starts without drafts and learns what they cost. `check`, for profiling in idle time, may
    raise to end it; nothing is printed then.
    """
    drafters = {name: proposers[name]()[1] for name in proposers if name in (engine.proposer_name, *COSTLY)}
    state.acceptance.self_limiting = SELF_LIMITING
    chains = head if head is not None and engine.proposer_name == head.name and head.shape is None else None
    say = print if profile and check is None else lambda *_, **__: None

    def make() -> CostTable:
        if not profile:
            raise Unmeasured("put off")
        say("measuring the cost of steps and drafts on this machine ...", file=sys.stderr, flush=True)
        return measure(
            ProfiledEngine(engine),
            drafters,
            vocab_size=engine.target.config.vocab_size,
            context=engine.context,
            max_batch=engine.config.max_batch,
            max_rows=engine.sizes.max_rows,
            clock=timer,
            check=check or (lambda: None),
        )

    key = what_costs_depend_on(engine, drafters)
    name = json.dumps(key, sort_keys=True)
    if chains is not None:
        chains.confidence = Confidence(AcceptanceModel())  # scoring is part of the cost of drafts
    try:
        if name not in state.costs or (profile and state.profile_due):
            state.costs[name] = CostModel(kept_table(key, make))
            state.profile_due = False
    except Unmeasured as error:
        state.profile_due = not profile
        say(f"costs not measured ({error}): no drafts until trial steps have shown what drafts cost", file=sys.stderr)
        state.costs.setdefault(name, guessed_cost_model(drafters))
    finally:
        if chains is not None:
            chains.confidence = state.confidence
    return Controller(state.costs[name], state.acceptance, None if chains is None else state.confidence)


def what_costs_depend_on(engine: Serving, drafters: Mapping[str, Budget]) -> dict[str, object]:
    """Return all that decides on the times of steps and drafts, in terms that the next start can compare."""
    target, on_gpu = engine.target, engine.device.type == "cuda"
    return {
        "target": target.fingerprint or repr(target.config),
        "head": None if engine.head is None else repr(engine.head.config),
        "draft_model": None if engine.draft_model is None else repr(engine.draft_model.config),
        "drafters": {name: list(limit) for name, limit in sorted(drafters.items())},
        "device": torch.cuda.get_device_name(engine.device) if on_gpu else f"{processor()} {' '.join(flags())}",
        "threads": list(asdict(engine.threads.plan).values()),
        "dtype": str(engine.dtype),
        "torch": torch.__version__,
        "engine": asdict(engine.config)
        | {"prefill_chunk": engine.sizes.prefill_chunk, "max_rows": engine.sizes.max_rows},
    }
