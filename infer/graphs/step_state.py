"""The requests of captured decode steps, in tensors at fixed addresses from which graphs read and to which they write.

Rows that a head has not read are padded to one width, and requests to the batch size of a graph. Padding requests use
the null block. No row attends to what comes after it, so padding does not change the bits of any other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.kvcache.pool import KVPool
from infer.request import Request
from infer.sampling.choose import choice_parameters
from infer.speculation.proposers.draft_loops.base import Unread
from infer.steps.runner import Rows, Runner
from kernels.advance import advance
from kernels.choose import choose
from kernels.copies import sent, upload
from kernels.operands import LEADING, NO_LIMITS, ChoiceParameters, Limits, Progress
from kernels.rows import AttentionRows
from kernels.verify import Accepted

UNREAD = 2  # maximum number of launched, unread steps: one that may be running and the next one
NUMBERS = 11  # integers per request: the fields of GraphBatch from `slots` on, top_k, two halves of the seed
NODES, DEPTH = 6, 7


class GraphBatch(NamedTuple):
    """The first B requests of a StepState; implements DecodeBatch.

    Row j of W is the head's slot `first + j - 1`: the token at position `first + j` and the features of the position
    before it.
    """

    pool: KVPool
    longest: int  # bound on the number of keys that a row attends to
    parameters: ChoiceParameters
    ids: Tensor  # [B, W]
    features: Tensor  # [B, W, F]
    slots: Tensor  # [B] row of the block table
    first: Tensor  # [B] place of row 0 in the head's KV layers
    last: Tensor  # [B] the last row that is not padding; it holds the root
    roots: Tensor  # [B] the root's position
    base: Tensor  # [B] the head's KV begins at this place, a multiple of the page size
    limit: Tensor  # [B] the root goes no further
    nodes: Tensor  # [B] the budget
    depth: Tensor  # [B] likewise
    exit_terms: Tensor  # [B, T] what decides on the early exit of a chain (early_exit.py)
    results: Tensor  # [B, LEADING + 2 W'] what the host reads of a step (kernels/advance.py), paths of at most W' nodes

    @property
    def root_tokens(self) -> Tensor:
        return self.ids.gather(1, self.last[:, None])[:, 0]

    def unread(self, *, kv: bool) -> Unread:
        """Return what the head reads; `kv`: it has KV layers."""
        batch, width = self.ids.shape
        row = torch.arange(width, device=self.ids.device)
        rows, requests = None, self.slots
        if kv:
            table = self.pool.page_lists
            requests = torch.add(self.base // self.pool.page_size, self.slots, alpha=table.shape[1])
            rows = self._grid(table, requests, self.first - self.base, width, first=1)
        slots = (self.first[:, None] + (row - 1)).flatten()
        ends = torch.arange(0, batch * width, width, device=self.ids.device) + self.last
        inputs = self.ids.flatten(), self.features.flatten(0, 1), slots, rows
        return Unread(*inputs, ends, self.roots, self.base, requests, self.parameters)

    def forward(self, tree: DraftTree, runner: Runner, aux: Sequence[int]) -> Rows:
        tree_mask = None if tree.is_chain else tree.ancestors
        rows = self._grid(self.pool.table, self.slots, self.roots, tree.token.shape[1], tree_mask=tree_mask)
        return runner.forward(tree.token.flatten(), rows, aux, None if tree.is_chain else tree.depth.flatten())

    def choose(self, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        batch, width = tree.token.shape
        return choose(logits, self.parameters.repeated(width), positions).view(batch, width)

    def accept(self, tree: DraftTree, choice: Tensor) -> Accepted:
        """Also writes the results, and the next step's inputs in place."""
        progress = Progress(self.slots, self.roots, self.limit, self.ids, self.first, self.last, self.results)
        shape = {"width": tree.path_width, "is_chain": tree.is_chain}
        return advance(tree.nodes, choice, progress, self.pool.table, self.pool.page_size, **shape)

    def _grid(
        self,
        table: Tensor,
        requests: Tensor,
        start: Tensor,
        width: int,
        *,
        tree_mask: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        sizes = {"page_size": self.pool.page_size, "longest": self.longest}
        return AttentionRows.grid(table, requests, start, width, **sizes, tree_mask=tree_mask, first=first)


class StepState:
    """Holds up to `batch` requests, which `load` writes while nothing runs that reads them.

    `width`: the most rows of a request that its head has not read; `spare`: rows that follow them (draft_loops).
    """

    def __init__(
        self,
        pool: KVPool,
        batch: int,
        width: int,
        spare: int,
        features: int,
        terms: int,
        dtype: torch.dtype,
        *,
        pinned: bool,
    ) -> None:
        self._pool, device = pool, pool.device
        self._ids = torch.zeros(batch, width + spare, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(NUMBERS, batch, dtype=torch.int64, device=device)
        self._fractions = torch.zeros(3, batch, device=device)  # temperature, top-p, min-p
        self._terms = torch.zeros(batch, terms, device=device)
        self._budgets = torch.zeros(UNREAD, 2, batch, dtype=torch.int64, pin_memory=pinned)
        self._host_terms = torch.zeros(UNREAD, batch, terms, pin_memory=pinned)
        self.results = torch.zeros(batch, LEADING + 2 * width, dtype=torch.int64, device=device)
        self.features = torch.zeros(batch, width + spare, features, dtype=dtype, device=device)
        self.before = torch.zeros(batch, width, features, dtype=dtype, device=device)  # of the step before

    @property
    def limit(self) -> Tensor:
        return self._numbers[5]

    def of(self, batch: int, longest: int, limits: Limits) -> GraphBatch:
        """Return the first `batch` requests. Must be called inside the function that is captured."""
        *numbers, top_k, low, high = self._numbers
        temperature, top_p, min_p = self._fractions
        parameters = (x[:batch] for x in (temperature, top_k, top_p, min_p, low, high))
        tensors = (x[:batch] for x in (self._ids, self.features, *numbers, self._terms, self.results))
        return GraphBatch(self._pool, longest, ChoiceParameters(*parameters, limits=limits), *tensors)

    def load(
        self,
        batch: int,
        requests: Sequence[Request] = (),
        features: Sequence[Tensor] = (),
        bases: Sequence[int] = (),
        limits: Sequence[int] = (),
    ) -> Limits:
        """Write the requests, with `features[b]` `[n, F]` of their last positions, and padding up to `batch`.

        Returns which limits the rows use.
        """
        width, device = self._ids.shape[1], self._ids.device
        ids, numbers = torch.zeros(batch * width, dtype=torch.int64), torch.zeros(NUMBERS, batch, dtype=torch.int64)
        fractions, tokens, places, columns = torch.zeros(3, batch), list[int](), list[int](), list[list[int]]()
        numbers[0], numbers[1], fractions[1] = self._pool.null_row, 1, 1.0
        for b, (request, rows, base, limit) in enumerate(zip(requests, features, bases, limits, strict=True)):
            count = len(rows)
            start = request.computed - count
            tokens += request.tokens[start + 1 : start + count + 1]
            places += range(b * width, b * width + count)
            columns.append([request.table_row, start + 1, count - 1, len(request.tokens) - 1, base, limit])
        if requests:
            ids[places], numbers[:6, : len(requests)] = torch.tensor(tokens), torch.tensor(columns).T
            self.features.flatten(0, 1).index_copy_(0, upload(places, device), torch.cat(list(features)))
        p, count = choice_parameters(requests, torch.device("cpu"), drafting=True), len(requests)
        if p is not None:
            numbers[8:, :count] = torch.stack([p.top_k, p.seed_low, p.seed_high])
            fractions[:, :count] = torch.stack([p.temperature, p.top_p, p.min_p])
        self._ids[:batch], self._numbers[:, :batch], self._fractions[:, :batch] = (
            sent(tensor, device) for tensor in (ids.view(batch, width), numbers, fractions)
        )
        return NO_LIMITS if p is None else p.limits

    def set_budgets(self, budgets: Sequence[Budget], terms: Tensor, turn: int) -> None:
        """Set budgets and exit terms of the first requests, between what was and what will be launched.

        `turn`: the host buffer to copy from, of which the last copy's step has been read.
        """
        host, host_terms = self._budgets[turn], self._host_terms[turn]
        host.zero_()
        host[:, : len(budgets)] = torch.tensor(budgets, dtype=torch.int64).T
        host_terms[: len(terms)] = terms
        self._numbers[NODES : DEPTH + 1].copy_(host, non_blocking=True)
        self._terms.copy_(host_terms, non_blocking=True)
