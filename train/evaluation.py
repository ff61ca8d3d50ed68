"""Evaluation of a head: held-out loss, simulated acceptance, and acceptance measured in the engine.

Held-out responses are the target's greedy continuations of fixed prompts, so simulation and engine run over the same
tokens and their acceptance lengths are comparable.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from infer.engine import Engine
from infer.request import Completion, SamplingParams, SpeculationStats
from kernels.choose import NO_LIMITS, ChoiceParameters, choose_best
from kernels.noise import MASK32
from kernels.walk import make_lattice, rank_candidates
from models.heads.base import Head
from models.heads.block import BlockHead, base_logits
from models.heads.config import CANDIDATES
from models.heads.weights import dtype_of
from models.vocab import coverage
from train.acceptance import Acceptance, Measured, stated, tau
from train.config import TrainConfig
from train.data import alignment
from train.data.sequences import Batch, Sequences
from train.features.online import Features, FeatureSource
from train.objectives.base import Objective, StepSums
from train.objectives.draft_states import draft_states

SAMPLED = 1.0  # temperature of the sampled acceptance on the model card
RANKS = 10  # of drafts whose accuracy is measured
WALKED_ROWS = 512  # of which the candidates' rows of a corrector's table are in memory at a time


class Sampling(NamedTuple):
    """How the B responses of a batch were sampled."""

    temperature: float
    seeds: Sequence[int]
    first: int = 0  # position in its request of the batch's first slot

    def parameters(self, rows: Tensor) -> ChoiceParameters:
        """Return the parameters of each row; `rows` `[R]` holds the index of the response that the row belongs to."""
        off = torch.zeros(len(self.seeds), device=rows.device)
        return ChoiceParameters(
            temperature=off + self.temperature,
            top_k=off.long(),
            top_p=off + 1,
            min_p=off,
            seed_low=torch.tensor([seed & MASK32 for seed in self.seeds], device=off.device),
            seed_high=torch.tensor([seed >> 32 for seed in self.seeds], device=off.device),
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
    parameters, start = (sampling.parameters(owner), sampling.first) if sampling else (None, 0)
    for step, state in enumerate(draft_states(head, batch.ids, features.aux, steps, first)):
        rows = start + slots + 1 + step  # at which the target samples t[i + 2 + step]
        drafts = best_drafts(head, state.flatten(0, 1), step, parameters, rows.repeat(len(batch.ids)), 1)[:, 0]
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


def rank_accuracies(head: Head, pairs: Iterable[tuple[Batch, Features]], steps: int) -> list[list[float]]:
    """Return by depth and rank how often the sequences' token had this rank in the draft."""
    counts = [count_ranks(head, *pair, steps, RANKS) for pair in pairs]
    hits, slots = (torch.stack(column).sum(0) for column in zip(*counts, strict=True))
    return (hits.double() / slots.clamp(min=1)[:, None]).round(decimals=4).tolist()


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
    """Return what the engine would accept, computed from the trainer's logits, over all rows: a prompt and a response.

    A response, greedy unless `sampling` is set, is walked as the engine decodes it: draft a chain of up to K tokens,
    accept the longest prefix that equals the response, emit it and the bonus token, continue from there. Drafts of
    sampled responses are sampled with the noise that the target used at the same position. The counts therefore equal
    the engine's.
    """
    matches = draft_matches(head, batch, features, steps, sampling).cpu()
    total = SpeculationStats()
    for index, assistant in enumerate(batch.assistant.cpu()):
        places = assistant.nonzero().squeeze(-1)
        total.merge(walk(matches[index], int(places[0]), int(places[-1]) + 1))
    return total


def step_metrics(prefix: str, sums: StepSums, step_weight: float) -> dict[str, float]:
    """Return the loss, and by step loss, accuracy and overlap Σ min(p, q); nan where there is no slot to average over.

    A loss is the mean over the slots that the draft vocabulary covers, so that heads with different ones can be
    compared; accuracy and overlap are over all slots. The loss is the sum of the steps', step k times step_weight ** k.
    """
    counts, means = sums.count.tolist(), (sums.loss / sums.covered).tolist()
    losses = [step_weight**step * mean for step, (mean, count) in enumerate(zip(means, counts, strict=True)) if count]
    correct, overlap = ((values / sums.count).tolist() for values in (sums.correct, sums.overlap))
    rates = (("loss", means), ("accuracy", correct), ("overlap", overlap))
    metrics = {f"{prefix}/{name}_{step}": mean for name, values in rates for step, mean in enumerate(values)}
    return {f"{prefix}/loss": sum(losses) if losses else math.nan, **metrics}


def describe_loss(metrics: Mapping[str, float]) -> str:
    """Return the held-out loss of `Evaluator.losses` for people, with the coverage beside it."""
    loss = metrics["eval/loss"]
    why = ", no slot lies inside the draft vocabulary" if math.isnan(loss) else ""
    return f"{stated(loss)} (coverage {100 * metrics['eval/coverage']:.1f} %{why})"


def acceptance_metrics(measured: Acceptance) -> dict[str, float]:
    metrics = {
        "eval/tau_simulated": tau(measured.simulated),
        "eval/tau_engine": tau(measured.engine),
        "eval/gap": measured.gap,
    }
    shares = enumerate(measured.engine.acceptance_by_position)
    return metrics | {f"eval/acceptance_{place}": share for place, share in shares}


def prompts_of(sequences: Sequences) -> list[list[int]]:
    rows = [sequences.row(index) for index in range(len(sequences))]
    return [ids[: int(assistant.int().argmax())].tolist() for ids, assistant in rows]


@dataclass
class Evaluator:
    """`held_out`: the engine's greedy responses. `check` is called while the engine runs and may raise to stop."""

    config: TrainConfig
    engine: Engine
    held_out: Sequences
    features: FeatureSource
    check: Callable[[], None] = lambda: None

    @cached_property
    def prompts(self) -> list[list[int]]:
        return prompts_of(self.held_out)

    def measure(self, head: Head) -> Acceptance:
        """Return the greedy acceptance."""
        return self._acceptance(head, self.held_out, 0.0)

    def measure_fully(self, head: Head) -> Measured:
        """Return the model card's measurements: greedy and sampled acceptance, and accuracy by rank of the draft."""
        sampled, steps = Sequences.of_completions(self._generate(SAMPLED)), self.config.eval_draft_tokens
        return Measured(
            greedy=self.measure(head),
            sampled=self._acceptance(head, sampled, SAMPLED),
            rank_accuracy=rank_accuracies(self._serving(head), self._batches(self.held_out), steps),
            held_out_prompts=len(self.prompts),
            coverage=self._coverage(head),
        )

    def _acceptance(self, head: Head, responses: Sequences, temperature: float) -> Acceptance:
        return Acceptance(self._simulate(head, responses, temperature), self._run_engine(head, responses, temperature))

    def _serving(self, head: Head) -> Head:
        """Return the head in the dtype in which the engine runs it."""
        return head if dtype_of(head) == self.engine.dtype else copy.deepcopy(head).to(self.engine.dtype)

    def _batches(self, sequences: Sequences) -> Iterator[tuple[Batch, Features]]:
        size = self.config.batch_size
        for start in range(0, len(sequences), size):
            batch = sequences.batch(range(start, min(start + size, len(sequences)))).to(self.engine.device)
            yield batch, self.features(batch)

    def _simulate(self, head: Head, responses: Sequences, temperature: float) -> SpeculationStats:
        serving, steps, total = self._serving(head), self.config.eval_draft_tokens, SpeculationStats()
        for batch, features in self._batches(responses):
            sampling = Sampling(temperature, batch.rows) if temperature else None
            total.merge(simulate(serving, batch, features, steps, sampling))
        return total

    def _run_engine(self, head: Head, responses: Sequences, temperature: float) -> SpeculationStats:
        """Run the engine with this head over the held-out prompts, with each prompt's index as its seed."""
        self.engine.set_proposer("head", head)
        completions = self._generate(temperature)
        self.engine.set_proposer("none")
        total = SpeculationStats()
        for index, completion in enumerate(completions):
            total.merge(completion.stats)
            ids, assistant = responses.row(index)
            if completion.token_ids != ids[assistant].tolist():
                self._explain(index, completion, temperature)
        return total

    def _explain(self, index: int, completion: Completion, temperature: float) -> None:
        """Raises ValueError if the engine's output differs from the stored response even without a head."""
        if not self.config.engine.exact:
            print("note: the engine's tokens differ with and without the head (engine.exact=false)", file=sys.stderr)
            return
        plain = self._generate(temperature)[index].token_ids
        assert completion.token_ids == plain, "speculation changed a token"
        raise ValueError(
            f"held-out prompt {index}: the target does not write here what it wrote when this run's data were made, on "
            "another machine or with other versions; go on where the run was begun, or begin anew with another "
            "run=<name> under another output_dir="
        )

    def _generate(self, temperature: float) -> list[Completion]:
        params = SamplingParams(temperature=temperature, max_tokens=self.config.eval_max_tokens)
        seeded = [replace(params, seed=index) for index in range(len(self.prompts))]
        return self.engine.generate(self.prompts, seeded, on_output=lambda *_: self.check())

    @torch.no_grad()
    def losses(self, objective: Objective) -> dict[str, float]:
        """Return loss, per-step means and draft-vocabulary coverage over all held-out responses."""
        sums = None
        for batch, features in self._batches(self.held_out):
            teacher = objective.teach(self.engine.target, features.hidden, batch)
            part_sums = objective(batch, features, teacher, objective.denominators(batch))[1]
            sums = part_sums if sums is None else StepSums(*(a + b for a, b in zip(sums, part_sums, strict=True)))
        assert sums is not None
        covered = {"eval/coverage": self._coverage(objective.head)}
        return {**step_metrics("eval", sums, objective.step_weight), **covered}

    def _coverage(self, head: Head) -> float:
        return coverage(self.held_out.ids[self.held_out.assistant], head.target_ids)
