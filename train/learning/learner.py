"""Trains a copy of the head that is served, by the head's own objective, and judges it on examples it never saw."""

from __future__ import annotations

import copy
import math
import time

import torch

from infer.config import LearningConfig
from infer.request import SpeculationStats
from models.heads import HEADS
from models.heads.base import Head
from models.heads.weights import module_of
from train.config import SCHEMAS, OptimConfig, default_objective
from train.features.teacher import recall
from train.learning.comparison import Comparison, accepted, compared
from train.learning.examples import Buffer, Example, batch_of, is_held_back, last_tokens, rooms, teaches
from train.learning.replay import Replay
from train.objectives.registry import OBJECTIVES

NEARER = (0.0, 0.25, 0.5, 0.75)  # shares of the first head in a mean of weights: the least that forgets little is sent
LEAST_JUDGED = 8  # examples: of fewer the error of a difference says little
OPTIM = OptimConfig(name="adamw")  # as in other training, but at a constant rate


class Learner:
    """`used` is the head that is served, in fp32 on the CPU; `candidate` is trained from its weights."""

    def __init__(
        self, config: LearningConfig, used: Head, steps: int, state_bytes: int, replay: Replay | None = None
    ) -> None:
        """`steps`: tokens of the chains by which heads are judged. `state_bytes`: of a token's hidden states.

        Raises ValueError for a head that cannot learn so, and for examples that take too much memory.
        """
        self.config, self.used, self.steps = config, used, min(steps, used.config.max_depth or steps)
        self.replay = replay
        self.candidate = trainable_copy(used)
        check_kind(used.config.name)
        name = default_objective(used.config.name)
        self.objective = OBJECTIVES[name](self.candidate, SCHEMAS["objective"][name](name=name))
        self.trained, self.judged = map(Buffer, rooms(config, state_bytes))
        self.examples = self.tokens = self.updates = 0  # that were kept, and done
        self.due = 0.0  # tokens still to be drawn
        self.new = self.done = 0  # tokens to train on, and trained on, since the last comparison
        self.tau = math.nan  # of the head in use, when it was last judged
        self.seconds = 0.0  # of updates and comparisons
        self._first = trainable_copy(used) if replay else used  # nothing reads it without
        self._at_first: list[SpeculationStats] = []  # what was accepted of the replay before anything was learnt
        self._restart()

    def add(self, example: Example) -> None:
        """Keep an example, to train on or to judge on; a response of less than two tokens has nothing to learn from."""
        held_back = is_held_back(example.ids, self.config.held_back)
        example = last_tokens(example, self.config.traffic_tokens)
        if not teaches(example.assistant):
            return
        self.examples += 1
        self.tokens += len(example.ids)
        (self.judged if held_back else self.trained).add(example)
        if not held_back:
            tokens, passes = len(example.ids), self.config.passes
            self.new += tokens
            self.due = min(self.due + passes * tokens, passes * self.trained.tokens)

    @property
    def update_due(self) -> bool:
        return self.due >= self.config.traffic_tokens

    @property
    def comparison_due(self) -> bool:
        """Where more is served than there is time to train on, updates are always due, so they may not come first."""
        every, enough = self.config.every_tokens, len(self.judged.examples) >= LEAST_JUDGED
        trained = self.done >= self.config.passes * every or not self.update_due
        return self.new >= every and enough and trained and self.updates > 0

    def update(self) -> None:
        """Take one optimiser step; one whose gradient is not finite changes nothing."""
        started = time.perf_counter()
        generator, head = torch.Generator().manual_seed(self.updates), self.candidate
        examples = self.trained.draw(self.config.traffic_tokens, generator)
        taken = sum(len(example.ids) for example in examples)
        self.due, self.done = self.due - taken, self.done + taken
        if self.replay:
            examples += self.replay.beside(examples)
        batch, features = batch_of(examples, head.config.aux_layers, self.config.batch_tokens)
        assert features.top is not None
        teacher = recall(features.top, batch, head.target_ids, head.config.vocab_size)
        denominators = self.objective.denominators(batch)
        loss, _ = self.objective(batch, features, teacher, denominators, metrics=False, generator=generator)
        loss.backward()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIM.clip)
        if math.isfinite(norm) and math.isfinite(loss.detach()):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1
        self.seconds += time.perf_counter() - started

    def compare(self) -> Comparison:
        """Judge the candidate. If it is better it becomes the head in use, if worse it begins anew from that.

        One that forgets its replay is judged nearer to the first head: the mean of both heads' weights keeps more than
        it gives up of what was learnt (WiSE-FT, arXiv:2109.01903).
        """
        started, before = time.perf_counter(), accepted(self.used, self.judged.examples, self.steps)
        for share in NEARER:
            head = self.nearer(share) if share else self.candidate
            comparison = compared(before, accepted(head, self.judged.examples, self.steps))
            if self.replay and comparison.better:
                judged = self.replay.judged
                self._at_first = self._at_first or accepted(self._first, judged, self.steps)
                after = accepted(head, judged, self.steps)
                comparison = comparison._replace(replay=compared(self._at_first, after)[:2])
            if not comparison.forgets:
                break
        self.new, self.done, self.tau = 0, 0, comparison.before
        if comparison.better:
            self.used.load_state_dict(head.state_dict())
            self.tau = comparison.after
        elif comparison.worse:
            self.candidate.load_state_dict(self.used.state_dict())
            self._restart()
        self.seconds += time.perf_counter() - started
        return comparison

    def nearer(self, share: float) -> Head:
        """Return the candidate with this share of the first head's weights."""
        head = trainable_copy(self.candidate)
        for value, first in zip(head.parameters(), self._first.parameters(), strict=True):
            if value.requires_grad:
                value.data.lerp_(first.data, share)
        return head

    def _restart(self) -> None:
        groups, betas, decay = self.objective.parameter_groups(), (OPTIM.betas[0], OPTIM.betas[1]), OPTIM.weight_decay
        self._optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=betas, weight_decay=decay, fused=True)


def trainable_copy(head: Head) -> Head:
    """Return a head with its own copy of what training changes; the rest is shared."""
    with torch.device("meta"):
        new = module_of(head.config.name).kind(head.config)
    trained = {name for name, parameter in new.named_parameters() if parameter.requires_grad}
    frozen = {id(parameter): parameter for name, parameter in head.named_parameters() if name not in trained}
    candidate = copy.deepcopy(head, frozen)
    for name, parameter in candidate.named_parameters():
        parameter.requires_grad_(name in trained)
    return candidate


def check_kind(name: str) -> None:
    """Raise ValueError for a head whose default objective needs more than the likeliest tokens."""
    if not can_learn(name):
        raise ValueError(
            f"head={name}: cannot learn from what it serves: objective={default_objective(name)} reads more of the "
            f"target than what verifying computes; heads that can: {', '.join(filter(can_learn, HEADS))}"
        )


def can_learn(name: str) -> bool:
    return not HEADS[name].is_target and not OBJECTIVES[default_objective(name)].reads_states
