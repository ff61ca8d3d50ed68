"""What operations take and return: the structures that dispatch shares with the implementations in C and Triton.

What is done with them is in kernels/<operation>.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32  # columns per word of a mask
LEADING = 3  # columns of a result row before its tokens: drafted nodes, depth of the deepest, accepted tokens
SHARED = 4  # columns of the terms of an early exit that all depths share: slope and prices; then two per depth
Values = Any  # a tensor [B], or on the host a list of B numbers


class QKNorm(NamedTuple):
    """RMSNorm of each query and each key head before the rotation (Qwen3), scales `[D]`; `centered` as in rms_norm."""

    q: Tensor
    k: Tensor
    eps: float
    centered: bool = False


class Limits(NamedTuple):
    """Which limits any row may use: a GPU searches no threshold for the others, and need not inspect the tensors."""

    top_k: bool = True
    top_p: bool = True
    min_p: bool = True


ALL_LIMITS, NO_LIMITS = Limits(), Limits(top_k=False, top_p=False, min_p=False)


@dataclass
class ChoiceParameters:
    """temperature, top_k (0 = off), top_p (1 = off), min_p (0 = off), the seed's 32-bit halves: `[R / repeat]` each.

    Every entry is for `repeat` consecutive rows, as those of a request in a padded batch.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor
    limits: Limits = ALL_LIMITS
    repeat: int = 1

    @property
    def restricts(self) -> bool:
        return any(self.limits)

    def repeated(self, count: int) -> ChoiceParameters:
        """Return the same parameters for `count` rows in place of each."""
        return replace(self, repeat=self.repeat * count)

    def rows(self, index: Tensor) -> ChoiceParameters:
        """Return the parameters of the rows `index` `[n]`."""
        if self.repeat > 1:
            index = index // self.repeat
        fields = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed_low, self.seed_high)
        return ChoiceParameters(*(value[index] for value in fields), limits=self.limits)

    def by_row(self) -> ChoiceParameters:
        """Return the same with an entry for every row."""
        if self.repeat == 1:
            return self
        count = len(self.temperature) * self.repeat
        return self.rows(torch.arange(count, device=self.temperature.device))


@dataclass
class Shaping:
    """Logits processing of n rows over V columns; None for what is not used. Penalties need `output`.

    Repetition is CTRL's (arXiv 1909.05858): for tokens in prompt or output, positive logits are divided by it, others
    multiplied.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: Tensor | None = None  # [V] bool, tokens in the prompt
    output: Tensor | None = None  # [V] fp32, counts of tokens in the output
    drafted: Tensor | None = None  # [n, D] int64 drafted tokens on the path to each row, padded with -1
    bias: Tensor | None = None  # [V] fp32
    allowed: Tensor | None = None  # [n, ceil(V / 32)] int32: bit c % 32 of word c // 32 for column c

    @property
    def penalizes(self) -> bool:
        return self.repetition != 1 or bool(self.presence) or bool(self.frequency)


class Frontier(NamedTuple):
    """The nodes of a level that are run, `[B, M]` each."""

    log_prob: Tensor  # cumulative
    index: Tensor  # int64, the candidate's number
    tree_mask: Tensor  # int64, bit j for the j-th node that was run: ancestors and the node itself; 0 for the root

    @classmethod
    def root(cls, batch: int, device: torch.device) -> Frontier:
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return cls(torch.zeros(batch, 1, device=device), zeros - 1, zeros)


class Picked(NamedTuple):
    """The candidates of a level that are run next."""

    parent: Tensor  # [B, M'] index of each one's parent among the M nodes that were run before
    token: Tensor  # [B, M']
    frontier: Frontier


class Level(NamedTuple):
    """The candidates of a level, in the order of their parents."""

    token: Tensor  # [B, M * R] int64
    parent: Tensor  # [B, M * R] int64, -1 for the root
    score: Tensor  # [B, M * R]; -inf for one that must not be proposed
    picked: Picked


class Candidates(NamedTuple):
    """The candidates of all levels."""

    token: Tensor  # [B, C] int64
    parent: Tensor  # [B, C] int64
    level: Tensor  # [C] from 1
    score: Tensor  # [B, C]


class Nodes(NamedTuple):
    """The fields of a DraftTree. For chains they may be expanded from one row."""

    token: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int32
    depth: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N] int64
    length: Tensor  # [B]


class Progress(NamedTuple):
    """B requests between two steps, int64; `advance` writes all but `slots` and `limit`.

    Of a path of length n the first n entries of `ids` and of both halves of a result row count; up to the width of the
    tree the others become 0.
    """

    slots: Tensor  # [B] rows of the block table
    roots: Tensor  # [B] the root's position
    limit: Tensor  # [B] the root goes no further
    ids: Tensor  # [B, >= W] the emitted tokens, which a head reads next
    first: Tensor  # [B] position of the first of them
    last: Tensor  # [B] index of the last of them
    results: Tensor  # [B, LEADING + 2 W] the columns above, then tokens and path, which begins with the root


class Drafting(NamedTuple):
    """B chains that are being drafted."""

    active: Values  # bool, which have reached the level
    length: Values  # int64
    chance: Values  # fp32, the probability that all tokens before the level are accepted

    @classmethod
    def begin(cls, depths: Values) -> Drafting:
        if isinstance(depths, list):
            return cls([depth > 0 for depth in depths], [0] * len(depths), [1.0] * len(depths))
        return cls(depths > 0, torch.zeros_like(depths), torch.ones_like(depths, dtype=torch.float32))


class Lattice(NamedTuple):
    """K candidates of each of the D slots of B blocks, ascending."""

    column: Tensor  # [B, D, K] draft ids
    token: Tensor  # [B, D, K] their target ids
    logit: Tensor  # [B, D, K] fp32, of the LM head


class Transition(NamedTuple):
    """What candidates are scored by after a token.

    With `predecessor` the query of a slot after token t is row t, times the slot's `factor` if there is one.
    """

    successor: Tensor  # [Vd, r] by draft id
    predecessor: Tensor | None = None  # [V, r] by target id
    factor: Tensor | None = None  # [B, D, r]

    def query(self, slot: int, before: Tensor) -> Tensor:
        """Return the queries `[B, M, r]` of a slot after the tokens `before` `[B, M]`."""
        assert self.predecessor is not None
        rows = F.embedding(before, self.predecessor)
        return rows if self.factor is None else rows * self.factor[:, slot, None]
