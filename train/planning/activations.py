"""Estimate of a head's activation memory for a training batch, by a dry run on meta tensors.

The head's own code runs forward and backward on torch's meta tensors, which have only shape and dtype, and the bytes
alive at the same time are counted. Every slot is trained on, as in a batch of responses without prompts, in fp32: real
batches take less, those of precision=bf16 about a sixth.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.vocabulary import TeacherLogits
from models.heads.borrowing import borrow
from models.targets.llama import LlamaTarget
from train.config import TrainConfig
from train.data.sequences import Batch
from train.objectives.base import Objective
from train.objectives.draft_states import draft_states
from train.objectives.registry import OBJECTIVES
from train.objectives.teacher import SharedLogits, Teacher
from train.preparation.head import make_head


class LiveBytes(TorchDispatchMode):
    """While active, counts bytes of live tensors created since it was entered (`now`), and their maximum (`peak`).

    torch's MemTracker refuses modules that are called more than once in a forward, as every step calls the head's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        pointer = storage._cdata
        if pointer in self._storages:
            return
        size = storage.nbytes()
        self._storages.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, pointer, size)

    def _drop(self, pointer: int, size: int) -> None:
        self._storages.discard(pointer)
        self.now -= size


def meta_objective(config: TrainConfig, target: LlamaTarget) -> Objective:
    """Return the objective around a head on the meta device, like `target`; a joint objective does not adapt it."""
    with torch.device("meta"):
        head = make_head(config.head, target.config)
        borrow(head, target)
        head.float()  # what is borrowed too, as in training
        return OBJECTIVES[config.objective.name](head, config.objective)


def rehearse(config: TrainConfig, target: LlamaTarget, rows: int, length: int) -> int:
    """Return the peak bytes beside parameters, gradients and optimiser, for `rows` rows of `length` slots.

    `target` is on the meta device too. Of a joint objective only the heads are profiled.
    """
    objective = meta_objective(config, target)
    head, ids = objective.head, torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), tuple(range(rows)))
    first, slots = objective.slots(batch, torch.Generator())
    pairs = [
        pair._replace(**{name: value.to("meta") for name, value in pair._asdict().items() if name != "share"})
        for pair in objective.pairs(batch, first, slots)
    ]
    with torch.device("meta"):
        feature = torch.zeros(rows, length, target.config.hidden_size, dtype=target.norm.weight.dtype)
        aux, denominators = [feature] * len(head.config.aux_layers), torch.ones(objective.steps)
        with LiveBytes() as live:
            teacher = meta_teacher(objective, len(pairs[0].rows), feature.dtype, target.config.vocab_size)
            states = draft_states(head, ids.to("meta"), aux, objective.steps, first, [s.to("meta") for s in slots])
            loss, _ = objective.losses(states, pairs, teacher, denominators, True)
            forward = live.peak
            loss.backward()
        gradients = sum(p.grad.numel() * p.grad.element_size() for p in head.parameters() if p.grad is not None)
    return max(forward, live.peak - gradients)


def meta_teacher(objective: Objective, rows: int, dtype: torch.dtype, vocab_size: int) -> Teacher:
    """Return a teacher of as many bytes as `Objective.teach` makes, for `rows` served slots."""
    head = objective.head
    column, drafts = torch.zeros(rows), head.config.draft_vocab_size
    logits, width = None, 0 if objective.fused else drafts
    if objective.native:
        teacher_logits = TeacherLogits(torch.zeros(rows, drafts, dtype=dtype), column, column, column)
        logits, width = SharedLogits(teacher_logits, column.long()), 0
    return Teacher(
        probs=torch.zeros(rows, width), negentropy=column, mass=column,
        choice=column.long(), draft_choice=column.long(), in_vocab=column.bool(), label=column.long(),
        hidden=torch.zeros(rows, head.config.target_hidden_size),
        make_probs=(lambda hidden: hidden.new_zeros(len(hidden), vocab_size)[:, :drafts].softmax(-1))
        if objective.fused else None,
        logits=logits,
    )  # fmt: skip
