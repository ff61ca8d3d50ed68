"""Simulated acceptance: what the engine would accept, computed from the trainer's logits.

A response is walked as the engine decodes it: draft a chain of up to K tokens, accept the longest prefix that equals
the response, emit it and the bonus token, continue from there. Drafts of sampled responses are sampled with the noise
that the target used at the same position. The counts therefore equal the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.request import SpeculationStats
from kernels.choose import choose_best
from kernels.noise import MASK32
from kernels.operands import NO_LIMITS, ChoiceParameters
from kernels.walk import make_lattice, rank_candidates
from models.heads.base import Head
from models.heads.block import BlockHead, base_logits
from models.heads.config import CANDIDATES
from train.data.sequences import Batch
from train.features.online import Features
from train.objectives import alignment
from train.objectives.draft_states import draft_states

WALKED_ROWS = 512  # of which the candidates' rows of a corrector's table are in memory at a time


class Sampling(NamedTuple):
    """How the B responses of a batch were sampled."""

    temperature: float
    seeds: Sequence[int]

    def parameters(self, rows: Tensor) -> ChoiceParameters:
        """Return the parameters of each row; `rows` `[R]` holds the index of the response that the row belongs to."""
        count, device = len(self.seeds), rows.device
        off = torch.zeros(count, device=device)
        return ChoiceParameters(
            temperature=torch.full((count,), self.temperature, device=device),
            top_k=off.long(),
            top_p=off + 1,
            min_p=off,
            seed_low=torch.tensor([seed & MASK32 for seed in self.seeds], device=device),
            seed_high=torch.tensor([seed >> 32 for seed in self.seeds], device=device),
            limits=NO_LIMITS,
        ).rows(rows)


def best_drafts(
    head: Head, state: Tensor, depth: int, parameters: ChoiceParameters | None, positions: Tensor, count: int
) -> Tensor:
    """Return the `count` target ids that the engine drafts first from N states `[N, S]` of a depth, `[N, count]`.

    Fewer if there are no more. A corrector chooses among as many candidates as in an engine with the default
    proposer.candidates.
    """
    candidates = head.corrector.num_candidates(CANDIDATES) if isinstance(head, BlockHead) else None
    if not isinstance(head, BlockHead) or candidates is None:
        count = min(count, head.config.draft_vocab_size)
        return choose_best(head.logits(state, depth), parameters, positions, head.target_ids, count)[0]
    parts, corrector, size = list[Tensor](), head.corrector, head.config.hidden_size
    for rows in torch.arange(len(state), device=state.device).split(WALKED_ROWS):
        states, sampling, at = state[rows], parameters and parameters.rows(rows), positions[rows]
        base = base_logits(head, states)[:, None]
        lattice = make_lattice(base, sampling, at, head.target_ids, candidates)
        query, transition = corrector.query(states)[:, None], corrector.transition(states[:, None, :size])
        assert transition is not None
        parts.append(rank_candidates(lattice, 0, transition, query, sampling, at, count)[0][:, 0])
    return torch.cat(parts)


@torch.no_grad()
def draft_matches(head: Head, batch: Batch, features: Features, steps: int, sampling: Sampling | None = None) -> Tensor:
    """Return bool `[B, T, K]`: whether the draft of slot i at depth k equals the sequence's token t[i + 2 + k].

    Tokens are teacher-forced: depth k counts only if all shallower drafts matched, and then the forced tokens are the
    drafted ones. (A parallel head does not read drafted tokens.)
    """
    first = int(alignment.served(batch.assistant).any(0).int().argmax())
    matches = batch.assistant.new_zeros(*batch.ids.shape, steps)
    slots = torch.arange(first, batch.ids.shape[1], device=batch.ids.device)
    owner = torch.arange(len(batch.ids), device=slots.device).repeat_interleave(len(slots))
    parameters = sampling and sampling.parameters(owner)
    for step, state in enumerate(draft_states(head, batch.ids, features.aux, steps, first)):
        positions = (slots + 1 + step).repeat(len(batch.ids))  # of the row at which the target samples t[i + 2 + step]
        drafts = best_drafts(head, state.flatten(0, 1), step, parameters, positions, 1)[:, 0]
        predicted = alignment.predicted_tokens(batch.ids, step)[:, first:]
        matches[:, first:, step] = drafts.view_as(predicted) == predicted
    return matches


@torch.no_grad()
def count_ranks(head: Head, batch: Batch, features: Features, steps: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Count how often the sequence's token has each rank in the draft, `[K, ranks]`, and the slots per depth, `[K]`."""
    masks = alignment.step_masks(batch.assistant, steps)
    first = int(masks[0].any(0).int().argmax())
    counts, slots = [], masks.flatten(1).sum(1)
    for step, state in enumerate(draft_states(head, batch.ids, features.aux, steps, first)):
        mask = masks[step][:, first:]
        tokens = alignment.predicted_tokens(batch.ids, step)[:, first:][mask]
        best = best_drafts(head, state[mask], step, None, torch.zeros_like(tokens), ranks)
        hits = (best == tokens[:, None]).sum(0)
        counts.append(torch.nn.functional.pad(hits, (0, ranks - len(hits))))
    return torch.stack(counts), slots


def walk(matches: Tensor, first: int, end: int) -> SpeculationStats:
    """Return the counts for one response t[first .. end-1], whose first token came from prefill; `matches [T, K]`.

    Like the engine it drafts no more than the tokens left in the response, less the bonus token. (Where a response ends
    with an end token, the engine cannot foresee that and drafts more; steps and emitted tokens are the same.)
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


def simulate(
    head: Head, batch: Batch, features: Features, steps: int, sampling: Sampling | None = None
) -> SpeculationStats:
    """Return the counts over all rows, each one prompt and one response, greedy unless `sampling` is set."""
    matches = draft_matches(head, batch, features, steps, sampling).cpu()
    total = SpeculationStats()
    for index, assistant in enumerate(batch.assistant.cpu()):
        places = assistant.nonzero().squeeze(-1)
        total.merge(walk(matches[index], int(places[0]), int(places[-1]) + 1))
    return total
