"""Evaluation of a head: held-out loss, simulated acceptance, and acceptance measured in the engine.

Held-out responses are the target's greedy continuations of fixed prompts, so simulation and engine run over the same
tokens and their acceptance lengths are comparable.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from infer.console.compare import Comparison, compare
from infer.engine import Engine
from infer.request import Completion, SamplingParams, SpeculationStats
from models.heads.base import Head
from models.heads.weights import dtype_of
from models.vocab import coverage
from train.acceptance import Sampling, count_ranks, simulate
from train.config import TrainConfig
from train.data.sequences import Batch, Sequences
from train.features.online import Features, FeatureSource
from train.objectives.base import Objective, StepSums
from train.publishing.export import Acceptance, Measured, stated, tau
from train.publishing.samples import marked_responses
from train.publishing.trackers import Sample, warn

SAMPLED = 1.0  # temperature of the sampled acceptance on the model card
RANKS = 10


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
    for place, share in enumerate(measured.engine.acceptance_by_position):
        metrics[f"eval/acceptance_{place}"] = share
    return metrics


def prompts_of(sequences: Sequences) -> list[list[int]]:
    rows = [sequences.row(index) for index in range(len(sequences))]
    return [ids[: int(assistant.int().argmax())].tolist() for ids, assistant in rows]


class Evaluator:
    """`held_out`: the engine's greedy responses. `check` is called while the engine runs and may raise to stop."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        held_out: Sequences,
        features: FeatureSource,
        check: Callable[[], None] = lambda: None,
        about_target: Mapping[str, float] | None = None,
    ) -> None:
        self._config, self._engine, self._check = config, engine, check
        self._held_out, self._features = held_out, features
        self._prompts = prompts_of(held_out)
        self.about_target = dict(about_target or {})  # metrics reported along with the losses

    def measure(self, head: Head) -> Acceptance:
        """Return the greedy acceptance."""
        return self._acceptance(head, self._held_out, 0.0)

    def measure_fully(self, head: Head) -> Measured:
        """Return the model card's measurements: greedy and sampled acceptance, and accuracy by rank of the draft."""
        sampled = Sequences.of_completions(self._generate(SAMPLED))
        return Measured(
            greedy=self.measure(head),
            sampled=self._acceptance(head, sampled, SAMPLED),
            rank_accuracy=self._rank_accuracy(head),
        )

    def _acceptance(self, head: Head, responses: Sequences, temperature: float) -> Acceptance:
        return Acceptance(self._simulate(head, responses, temperature), self._run_engine(head, responses, temperature))

    def _serving(self, head: Head) -> Head:
        """Return the head in the dtype in which the engine runs it."""
        return head if dtype_of(head) == self._engine.dtype else copy.deepcopy(head).to(self._engine.dtype)

    def _batches(self, sequences: Sequences) -> Iterator[tuple[Batch, Features]]:
        size = self._config.batch_size
        for start in range(0, len(sequences), size):
            batch = sequences.batch(range(start, min(start + size, len(sequences)))).to(self._engine.device)
            yield batch, self._features(batch)

    def _simulate(self, head: Head, responses: Sequences, temperature: float) -> SpeculationStats:
        serving, steps, total = self._serving(head), self._config.eval_draft_tokens, SpeculationStats()
        for batch, features in self._batches(responses):
            sampling = Sampling(temperature, batch.rows) if temperature else None
            total.merge(simulate(serving, batch, features, steps, sampling))
        return total

    def _rank_accuracy(self, head: Head) -> list[list[float]]:
        serving, steps = self._serving(head), self._config.eval_draft_tokens
        counts = [count_ranks(serving, *pair, steps, RANKS) for pair in self._batches(self._held_out)]
        hits, slots = (torch.stack(column).sum(0) for column in zip(*counts, strict=True))
        return (hits / slots.clamp(min=1)[:, None]).tolist()

    def _run_engine(self, head: Head, responses: Sequences, temperature: float) -> SpeculationStats:
        """Run the engine with this head over the held-out prompts, with each prompt's index as its seed."""
        self._engine.set_proposer("head", head)
        completions = self._generate(temperature)
        self._engine.set_proposer("none")
        total = SpeculationStats()
        for index, completion in enumerate(completions):
            total.merge(completion.stats)
            ids, assistant = responses.row(index)
            if completion.token_ids != ids[assistant].tolist():
                self._explain(index, completion, temperature)
        return total

    def _explain(self, index: int, completion: Completion, temperature: float) -> None:
        """Raises ValueError if the engine's output differs from the stored response even without a head."""
        if not self._config.engine.exact:
            warn("the engine's tokens differ with and without the head (engine.exact=false)")
            return
        plain = self._generate(temperature)[index].token_ids
        assert completion.token_ids == plain, "speculation changed a token"
        raise ValueError(
            f"held-out prompt {index}: the target does not write here what it wrote when this run's data were made, on "
            "another machine or with other versions; go on where the run was begun, or begin anew with another "
            "run=<name> under another output_dir="
        )

    def speeds(self, head: Head, concurrency: Sequence[int]) -> dict[int, float]:
        """Return the median greedy speed-up of this head over plain decoding, by number of concurrent prompts."""
        self._engine.set_proposer("head", head)
        params, ratios = SamplingParams(max_tokens=self._config.eval_max_tokens), {}
        for count in concurrency:
            groups = [self._prompts[start : start + count] for start in range(0, len(self._prompts), count)]
            ratios[count] = Comparison(list(compare(self._engine, groups, params))).ratio.median
            self._check()
        self._engine.set_proposer("none")
        return ratios

    def samples(self, head: Head, count: int) -> list[Sample]:
        """Return greedy responses to the first held-out prompts, with accepted draft tokens marked."""
        self._engine.set_proposer("head", head)
        samples = marked_responses(self._engine, self._prompts[:count], self._config.eval_max_tokens)
        self._engine.set_proposer("none")
        return samples

    def _generate(self, temperature: float) -> list[Completion]:
        params = SamplingParams(temperature=temperature, max_tokens=self._config.eval_max_tokens)
        seeded = [replace(params, seed=index) for index in range(len(self._prompts))]
        return self._engine.generate(self._prompts, seeded, on_output=lambda *_: self._check())

    @torch.no_grad()
    def losses(self, objective: Objective) -> dict[str, float]:
        """Return loss, per-step means and draft-vocabulary coverage over all held-out responses."""
        sums = None
        for batch, features in self._batches(self._held_out):
            teacher = objective.teach(self._engine.target, features.hidden, batch)
            part_sums = objective(batch, features, teacher, objective.denominators(batch))[1]
            sums = part_sums if sums is None else StepSums(*(a + b for a, b in zip(sums, part_sums, strict=True)))
        assert sums is not None
        covered = coverage(self._held_out.ids[self._held_out.assistant], objective.head.target_ids)
        return {**step_metrics("eval", sums, objective.step_weight), "eval/coverage": covered, **self.about_target}
