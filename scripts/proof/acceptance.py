"""What is accepted on the prompts, by position and prompt, and whether training would report the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infer.request import Completion, SamplingParams, SpeculationStats
from models.heads.base import Head
from scripts.proof.cases import Ask
from scripts.proof.engines import Engines
from scripts.proof.matrix import proposer_of
from train.acceptance import Acceptance
from train.data.sequences import Sequences
from train.evaluation import simulate
from train.features.online import compute_features

TOKENS = 64
GAP = 0.05  # of τ, between training and serving: rounding moves few tokens, a fault many


def measure_acceptance(engines: Engines, prompts: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Return by drafts what is accepted of greedy responses; for a head also what it cannot draft, and the parity."""
    head, results = engines.parts.head, dict[str, dict[str, Any]]()
    for drafts in (*(["chain"] if head is not None else []), "suffix"):
        completions = respond(engines, drafts, prompts)
        total = summed(completions)
        results[drafts] = {
            "acceptance_length": total.acceptance_length,
            "by_position": total.acceptance_by_position,
            "by_prompt": [completion.stats.acceptance_length for completion in completions],
        }
        if drafts == "chain" and head is not None:
            results[drafts] |= {"missed": missed(head, completions, total), **parity(engines, head, prompts)}
    return results


def respond(engines: Engines, drafts: str, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Completion]:
    params = SamplingParams(max_tokens=TOKENS)
    engine = engines.make(drafts, [Ask(tuple(ids), params) for ids in prompts], **settings)
    try:
        return engine.generate(prompts, params)
    finally:
        engine.close()


def summed(completions: Sequence[Completion]) -> SpeculationStats:
    total = SpeculationStats()
    for completion in completions:
        total.merge(completion.stats)
    return total


def missed(head: Head, completions: Sequence[Completion], total: SpeculationStats) -> float:
    """Return the share of the verifies that ended at a token outside the draft vocabulary, which no draft can reach."""
    known = set(head.target_ids.tolist())
    return sum(t not in known for each in completions for t in each.token_ids[1:]) / max(1, total.steps)


@torch.no_grad()
def parity(engines: Engines, head: Head, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return τ as the trainer simulates it on an engine's responses and as that engine measured it, and the `fault` if
    they differ by more than rounding explains.

    The head has its own weights in both, whatever engine.head_weights says: rounded ones draft a little otherwise.
    """
    completions = respond(engines, "chain", prompts, head_weights="same")
    batch = Sequences.of_completions(completions)
    rows = batch.batch(range(len(batch))).to(head.target_ids.device)
    depth = proposer_of("chain", engines.parts.proposer, head).draft_tokens
    steps = min(depth, head.config.max_depth or depth)
    features = compute_features(engines.parts.target, rows, head.config.aux_layers)
    measured = Acceptance(simulate(head, rows, features, steps), summed(completions))
    both, fault = measured.summary(), None
    if abs(measured.gap) > GAP:
        fault = f"chain: τ is {both['engine']} in serving and {both['simulated']} as training simulates it"
    return {"parity": both, "fault": fault}
