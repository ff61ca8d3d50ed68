"""Simulated acceptance: what the engine would accept, computed from the trainer's logits (DESIGN section 8).

A response is walked as the engine decodes it: draft a chain of up to K tokens, accept the run that equals the
response, emit it and the bonus token, go on from there. With greedy responses and greedy drafts the counts equal the
engine's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.request import SpeculationStats
from models.heads.eagle3 import Eagle3Head
from train import alignment
from train.data import Batch
from train.features import Features
from train.objectives.ttt import draft_states


@torch.no_grad()
def draft_matches(head: Eagle3Head, batch: Batch, features: Features, steps: int) -> Tensor:
    """bool `[B, T, K]`: the greedy draft of slot i at depth k equals the sequence's own token t[i + 2 + k].

    Tokens are teacher-forced: depth k counts only where all shallower drafts matched, and then forced and drafted
    agree.
    """
    first = int(alignment.served(batch.assistant).any(0).int().argmax())
    matches = batch.assistant.new_zeros(*batch.ids.shape, steps)
    for step, state in enumerate(draft_states(head, batch.ids, features.aux, steps, first)):
        drafts = head.draft_to_target(head.logits(state).argmax(-1))
        matches[:, first:, step] = drafts == alignment.predicted_tokens(batch.ids, step)[:, first:]
    return matches


def walk(matches: Tensor, first: int, end: int) -> SpeculationStats:
    """Counts for one response t[first .. end-1], whose first token came from the prefill; `matches [T, K]` of its row.

    Like the engine it drafts no further than tokens may still come, the bonus token set aside. (Where a response ends
    by itself, the engine cannot know that and drafts on; steps and emitted tokens are the same.)
    """
    stats = SpeculationStats()
    runs = matches.int().cumprod(1).sum(1).tolist()
    root = first
    while root < end - 1:
        drafted = min(matches.shape[1], end - 2 - root)
        accepted = min(runs[root - 1], drafted)
        stats.record(drafted=drafted, accepted=accepted, emitted=accepted + 1)
        root += accepted + 1
    return stats


def simulate(head: Eagle3Head, batch: Batch, features: Features, steps: int) -> SpeculationStats:
    """All rows of the batch, each one prompt and one response."""
    matches = draft_matches(head, batch, features, steps).cpu()
    total = SpeculationStats()
    for index, assistant in enumerate(batch.assistant.cpu()):
        places = assistant.nonzero().squeeze(-1)
        total.merge(walk(matches[index], int(places[0]), int(places[-1]) + 1))
    return total
