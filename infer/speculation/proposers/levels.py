"""Drafts chains with a recurrent head level by level: each level adds one token to every chain that continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from infer.request import Request
from infer.sampling.constraint import narrowed
from kernels.choose import ChoiceParameters
from kernels.rows import AttentionRows
from models.attention import no_attention

if TYPE_CHECKING:
    from infer.speculation.proposers.head import HeadProposer


class Levels(Protocol):
    """Drafts a batch of chains; the first level starts from the unread rows."""

    def draft(self, *, return_log_probs: bool) -> tuple[list[int], list[float] | None]:
        """Draft one more token of each chain; return their target ids.

        With `return_log_probs` it also returns their log-probabilities, under the noise that the head chose with.
        """
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Continue only these of the chains that took part in the last level; `indices` ascend."""
        ...


class StepByStep:
    """Drafts by the head's own operations: for any head and device, and where its logits have to be read or masked.

    Other implementations draft the same tokens.
    """

    def __init__(
        self, proposer: HeadProposer, requests: Sequence[Request], state: Tensor, parameters: ChoiceParameters | None
    ) -> None:
        """state `[B, S]`: of each request's last slot, which holds the root and has been read."""
        self.draft_probs: dict[int, list[Tensor]] = {}  # by request, for block verification: one distribution per level
        self._proposer, self._requests, self._state, self._parameters = proposer, list(requests), state, parameters
        self._active, self._depth = list(range(len(requests))), 0
        self._drafts: list[list[int]] = [[] for _ in requests]
        # [B] position at which the target chooses the next token (slot i drafts for i + 1), and the slot that reads it
        self._slots = torch.tensor([len(request.tokens) - 1 for request in requests], device=state.device)
        self._tokens = self._slots  # [B] drafted last, once there are any
        self._rows: AttentionRows | None = None

    def draft(self, *, return_log_probs: bool) -> tuple[list[int], list[float] | None]:
        if self._depth:
            self._step()
        proposer, batch = self._proposer, [self._requests[index] for index in self._active]
        logits = proposer.module.logits(self._state, self._depth)
        logits = narrowed(batch, logits, [self._drafts[index] for index in self._active], proposer.draft_ids)
        for place, row in proposer.draft_probs(batch, logits, self._parameters).items():
            self.draft_probs.setdefault(self._active[place], []).append(row)
        values = None
        if return_log_probs:
            best, log_probs = proposer.best(logits, self._slots, self._parameters, 1)
            self._tokens, values = best[:, 0], log_probs[:, 0].tolist()
        else:
            self._tokens = proposer.choice(logits, self._slots, self._parameters)
        tokens = self._tokens.tolist()
        for index, token in zip(self._active, tokens, strict=True):
            self._drafts[index].append(token)
        self._depth += 1
        return tokens, values

    def keep(self, indices: Sequence[int]) -> None:
        index = torch.tensor(indices, device=self._state.device)
        self._active = [self._active[place] for place in indices]
        self._state, self._tokens, self._slots = self._state[index], self._tokens[index], self._slots[index]
        self._parameters = self._parameters and self._parameters.rows(index)
        self._rows = self._rows and self._rows.kept(index)

    def _step(self) -> None:
        """Run the head over the tokens drafted last."""
        proposer, attention = self._proposer, no_attention
        if proposer.kv_layers:
            if self._rows is None:
                requests = [self._requests[index] for index in self._active]
                starts = [len(request.tokens) - 2 + self._depth for request in requests]
                self._rows = proposer.rows(requests, starts, [1] * len(requests))
            else:
                self._rows = self._rows.next()
            attention = proposer.attend(self._rows)
        self._state = proposer.module.step(self._tokens, self._state, self._slots, attention, self._depth)
        self._slots = self._slots + 1
