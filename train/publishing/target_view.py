"""The target that a head is measured and published with: as loaded, or fine-tuned together with the head.

An adapted target is a different model. It is published beside its head, under its own name, and all metrics of the head
are measured with the published files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.options.paths import resolve_path
from infer.request import SamplingParams
from models.lora import merge, unadapted
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.targets.writing import save_target
from models.tokenizer import Tokenizer
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.evaluation import Evaluator, prompts_of
from train.features.online import FeatureSource, online_features
from train.objectives.joint import JointObjective
from train.objectives.teacher import teach
from train.publishing.provenance import target_name
from train.storage import atomic


@dataclass(frozen=True)
class ServedTarget:
    """A target that no longer changes: as loaded, or as an AdaptedTarget was published."""

    config: TrainConfig  # `model` is this target
    target: LlamaTarget
    measure: Evaluator
    note: str = ""  # for the head's card

    def evaluator(self) -> Evaluator:
        """Return an evaluator on the target in its current state."""
        return self.measure

    def publish(self) -> ServedTarget:
        return self


@dataclass(frozen=True)
class AdaptedTarget:
    config: TrainConfig
    objective: JointObjective  # holds the target with its adapters
    tokenizer: Tokenizer
    settings: EngineConfig
    held_out: Sequences  # the unadapted target's greedy responses
    check: Callable[[], None]

    def evaluator(self) -> Evaluator:
        return self._evaluator_of(self._merged(), self.config)

    def publish(self) -> ServedTarget:
        before, name, target = self.config.model, self.config.published_model, self._merged()
        folder = resolve_path(self.config.output_dir) / "models" / name
        atomic.sweep(folder.parent)
        with atomic.replace_folder(folder) as staging:
            save_target(target, staging)
        model = replace(before, name=name, path=str(folder), revision=None)
        config = replace(self.config, model=model)
        target = load_target(str(folder), dtype=target.norm.weight.dtype, device=target.norm.weight.device)
        evaluator = self._evaluator_of(target, config)
        difference = difference_of(evaluator, before.name)
        atomic.write_text(
            folder / "README.md", CARD.format(name=name, before=target_name(before), difference=difference)
        )
        return ServedTarget(config, target, evaluator, f"The target is not `{before.name}`. {difference}\n\n")

    def _merged(self) -> LlamaTarget:
        target = copy.deepcopy(self.objective.target).requires_grad_(False)
        merge(target)
        return target

    def _evaluator_of(self, target: LlamaTarget, config: TrainConfig) -> Evaluator:
        features = online_features(target, self.objective.head.config.aux_layers)
        drift = self._drift(target, features)  # before the engine packs it
        drafts = ProposerConfig(name="head", max_draft_tokens=config.eval_draft_tokens)
        engine = Engine(target, tokenizer=self.tokenizer, proposer="none", config=self.settings, proposer_config=drafts)
        responses = self._responses(engine)
        about = {"eval/target_kl": drift, "eval/target_same_tokens": same_tokens(self.held_out, responses)}
        return Evaluator(config, engine, responses, features, self.check, about)

    def _responses(self, engine: Engine) -> Sequences:
        """Generate greedy responses to the held-out prompts."""
        params = SamplingParams(max_tokens=self.config.eval_max_tokens)
        completions = engine.generate(prompts_of(self.held_out), params, on_output=lambda *_: self.check())
        return Sequences.of_completions(completions)

    @torch.no_grad()
    def _drift(self, target: LlamaTarget, features: FeatureSource) -> float:
        """Return mean KL(unadapted || adapted) per token, in nats, over the unadapted target's held-out responses."""
        objective, size, total, count = self.objective, self.config.batch_size, 0.0, 0.0
        before = online_features(objective.target, objective.head.config.aux_layers)
        for batch in self.held_out.batches(range(len(self.held_out)), size):
            batch = batch.to(target.norm.weight.device)
            with unadapted(objective.target):
                teacher = teach(objective.target, before(batch).hidden, batch, objective.head.target_ids)
            total += objective.drift(batch, features(batch).hidden, teacher).item()
            count += objective.denominators(batch)[0].item()
        return total / max(1.0, count)


def same_tokens(one: Sequences, other: Sequences) -> float:
    """Return the share of tokens in the responses of `one` that come before the first difference from `other`."""
    same = total = 0
    for index in range(len(one)):
        a, b = (ids[assistant].tolist() for ids, assistant in (one.row(index), other.row(index)))
        equal = [x == y for x, y in zip(a, b, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(a)
    return same / max(1, total)


def difference_of(evaluator: Evaluator, before: str) -> str:
    about = evaluator.about_target
    return (
        f"It was trained along with its head and writes other text than `{before}`: KL "
        f"{about['eval/target_kl']:.4f} nats per token on held-out responses of `{before}`, of whose greedy tokens "
        f"{100 * about['eval/target_same_tokens']:.1f} % come the same before the first that differs."
    )


CARD = """# {name}

`{before}` with low-rank adapters merged into its weights. {difference}
Speculation with the head changes none of this target's tokens; it is the target itself that differs.
"""
