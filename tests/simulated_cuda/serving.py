"""Serves requests on a simulated device and says where the host waited in a step."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.heads.draft_model.head import DraftModelHead
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.heads import make_head
from tests.simulated_cuda.machine import Machine, Wait
from tests.simulated_cuda.matrix import DRAFTERS, REQUESTS, Drafter

# Of one length: no step both prefills and decodes. With what follows they fill two pages and begin a third.
PROMPTS = ([5, 6, 7, 8] * 6 + [5, 6], [9, 8] * 13)
SIZES: dict[str, Any] = {"max_batch": 2, "max_tokens_in_cache": 512, "prefill_chunk": 16, "max_rows": 32}
CONTROL = {"advance_kernel", "grow_kernel", "best_kernel"}  # what decides on the course of a step is always computed
SAMPLER = {"shape_kernel", "best_of_block", "best_of_row"}
Phases = dict[str, Counter[Wait]]  # "prompt", "decode": the most waits of each kind in any step of that phase


def make_engine(
    folder: Path, drafter: Drafter, device: str = "cuda:0", *, profile: bool = True, **config: Any
) -> Engine:
    """Make an engine of the target in `folder` with random heads.

    Every call of the clock that its costs are measured with takes a millisecond, so that drafts seem to cost nothing.
    """
    target, draft, calls = *(load_target(str(folder), device=device) for _ in range(2)), itertools.count()
    adaptive = drafter.config.get("adaptive", False)
    return Engine(
        target,
        tokenizer=Tokenizer.load(folder),
        head=None if drafter.head is None else make_head(load_target(str(folder)), drafter.head),
        draft_model=DraftModelHead.of(draft, target.config.vocab_size) if drafter.draft_model else None,
        proposer=drafter.proposer,
        config=EngineConfig(**SIZES | config),
        proposer_config=ProposerConfig(name="auto", **{"adaptive": False} | drafter.config),
        timer=lambda: next(calls) * 1e-3,
        probe=False,
        profile=profile and adaptive and config.get("graphs") == "on",  # without graphs it takes a minute
    )


def serve(engine: Engine, machine: Machine, params: SamplingParams) -> Phases:
    """Serve PROMPTS together. Returns the waits in the steps that prefill and in those that do not."""
    for prompt in PROMPTS:
        engine.add(prompt, params)
    phases: Phases = {"prompt": Counter(), "decode": Counter()}
    started, reasons = False, list[str | None]()
    while engine.has_work:
        with machine.counting() as step:
            reasons += [output.finish_reason for output in engine.step()]
        phase = "prompt" if engine.activity.startswith("prefill") else "decode"
        started = started or phase == "prompt"
        if started:  # before that a round is drained that requests have left in flight
            phases[phase] |= step
    assert "error" not in reasons
    return phases


def waits_of(folder: Path, machine: Machine, name: str, *, graphs: str) -> dict[str, Phases]:
    """Serve every kind of request of a drafter on the second device, which is not the current one; return the waits by
    kind. What is built on first use is not counted.
    """
    drafter = DRAFTERS[name]
    engine = make_engine(folder, drafter, "cuda:1", graphs=graphs)
    serve(engine, machine, REQUESTS[drafter.requests[0]])
    waits = {}
    for kind in drafter.requests:
        machine.computed = CONTROL | SAMPLER if kind == "grammar" else CONTROL  # whose tokens must obey the mask
        waits[kind] = serve(engine, machine, REQUESTS[kind])
    assert engine.stats.proposer_failures == 0
    assert drafter.proposer in ("none", "auto") or engine.stats.speculation.drafted > 0
    return waits
