"""How good a head is: held-out loss, simulated acceptance, and the acceptance that the real engine measures.

Held-out responses are the target's own greedy continuations of fixed prompts, so the trainer's walk and the engine
speak of the same tokens, and their acceptance lengths may be compared (DESIGN section 8).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats, StepOutput
from models.heads.eagle3 import Eagle3Head
from models.vocab import coverage
from train.acceptance import simulate
from train.config import TrainConfig
from train.data import Sequences
from train.export import Measured
from train.features import FeatureSource
from train.objectives.ttt import StepSums, TrainingTimeTest, slot_counts, teach
from train.trackers import warn


def step_metrics(prefix: str, sums: StepSums) -> dict[str, float]:
    """Means per step, and their names: loss, accuracy and Σ min(p, q), the last two over the full vocabulary."""
    metrics = {}
    for name, values in (("loss", sums.loss), ("accuracy", sums.correct), ("overlap", sums.overlap)):
        for step, mean in enumerate((values / sums.count.clamp(min=1)).tolist()):
            metrics[f"{prefix}/{name}_{step}"] = mean
    return metrics


def measured_metrics(measured: Measured) -> dict[str, float]:
    metrics = {
        "eval/tau_simulated": measured.simulated.acceptance_length,
        "eval/tau_engine": measured.engine.acceptance_length,
        "eval/gap": measured.gap,
    }
    for place, share in enumerate(measured.engine.acceptance_by_position):
        metrics[f"eval/acceptance_{place}"] = share
    return metrics


class Evaluator:
    """`check` is called while the engine runs and may raise to stop."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        held_out: Sequences,
        features: FeatureSource,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._engine, self._check = config, engine, check
        self._held_out, self._features = held_out, features
        rows = [held_out.row(index) for index in range(len(held_out))]
        self._prompts = [ids[: int(assistant.int().argmax())].tolist() for ids, assistant in rows]
        self._responses = [ids[assistant].tolist() for ids, assistant in rows]

    def measure(self, head: Eagle3Head) -> Measured:
        return Measured(self.simulate(head), self.run_engine(head))

    def simulate(self, head: Eagle3Head) -> SpeculationStats:
        """In the dtype in which the engine runs the head."""
        serving = head
        if head.norm.weight.dtype != self._engine.dtype:
            serving = copy.deepcopy(head).to(self._engine.dtype)
        total = SpeculationStats()
        for start in range(0, len(self._held_out), self._config.batch_size):
            rows = range(start, min(start + self._config.batch_size, len(self._held_out)))
            batch = self._held_out.batch(rows).to(self._engine.device)
            total.merge(simulate(serving, batch, self._features(batch), self._config.eval_draft_tokens))
        return total

    def run_engine(self, head: Eagle3Head) -> SpeculationStats:
        """The engine with this head over the held-out prompts, greedy."""

        def heed(index: int, output: StepOutput) -> None:
            self._check()

        self._engine.set_proposer("head", head)
        params = SamplingParams(max_tokens=self._config.eval_max_tokens)
        completions = self._engine.generate(self._prompts, params, on_output=heed)
        self._engine.set_proposer("none")
        total = SpeculationStats()
        for completion, response in zip(completions, self._responses, strict=True):
            total.merge(completion.stats)
            if completion.token_ids != response:
                assert not self._config.engine.exact, "speculation changed a token"
                warn("the engine's greedy tokens differ with and without the head (engine.exact=false)")
        return total

    @torch.no_grad()
    def losses(self, objective: TrainingTimeTest) -> dict[str, float]:
        """Loss, per-step means and draft-vocabulary coverage over all held-out responses."""
        steps = objective.config.steps
        denominators = slot_counts(self._held_out.batch(range(len(self._held_out))).assistant, steps)
        denominators = denominators.to(self._engine.device)
        loss, sums = 0.0, None
        for start in range(0, len(self._held_out), self._config.batch_size):
            rows = range(start, min(start + self._config.batch_size, len(self._held_out)))
            batch = self._held_out.batch(rows).to(self._engine.device)
            features = self._features(batch)
            teacher = teach(self._engine.target, features.hidden, batch.assistant, objective.head.d2t)
            part, part_sums = objective(batch, features, teacher, denominators)
            loss += part.item()
            sums = part_sums if sums is None else StepSums(*(a + b for a, b in zip(sums, part_sums, strict=True)))
        assert sums is not None
        covered = coverage(self._held_out.ids[self._held_out.assistant], objective.head.t2d)
        return {"eval/loss": loss, **step_metrics("eval", sums), "eval/coverage": covered}
