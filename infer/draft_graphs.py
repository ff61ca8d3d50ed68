"""A head's draft loop by CUDA graphs: what it reads, and every token it drafts, in one launch and one answer.

The rows that it reads are padded like a verify's (infer/verify_graphs.py): what lies after a request's own rows is
written anew by the drafts, in order, before any of them looks there. Every request is drafted for as deep as the graph
goes; what its budget does not hold is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.graphs import Buckets, Graph, GraphMemory, at_least, doubling
from infer.kv_cache import KVPool
from infer.proposers.head import HeadProposer
from infer.proposers.shapes import grow
from infer.request import Request
from infer.sampling import choice_parameters
from kernels.choose import ChoiceParameters, choose
from kernels.rows import AttentionRows
from models.attention import Attention, no_attention

NUMBERS = 10  # of a request: slot, first place, last row, root, top_k, two halves of the seed; three of them fp64


class DraftGraphs:
    """One graph per number of requests and, for chains, depth; for rows that ask for top-k, top-p or min-p, and for
    those that don't.

    `deepest`: tokens that the proposer may draft one after the other; as many rows and one more can wait to be read.
    """

    def __init__(
        self, proposer: HeadProposer, pool: KVPool, buckets: Buckets, deepest: int, memory: GraphMemory
    ) -> None:
        self._proposer, self._head, self._pool, self._memory = proposer, proposer.module, pool, memory
        self._shape = proposer.shape
        self._depths = doubling(deepest) if self._shape is None else (self._shape.depth,)
        self._longest = buckets.longest
        self._width = deepest + 1 if proposer.kv_layers else 1  # rows that are read, at most
        self._reach = self._width + (deepest if self._shape is None else self._shape.rows)  # places past the tokens
        self._batches = tuple(batch for batch in buckets.batches if batch * self._width <= buckets.most)
        most = max(self._batches, default=0)
        size = most * (self._width + NUMBERS)
        # Never written while a copy from it may be under way: every draft ends by waiting for its tokens.
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=memory.pool is not None)
        self._device = torch.zeros(size, dtype=torch.int64, device=pool.device)
        config = self._head.config
        features = most * self._width, len(config.aux_layers) * config.target_hidden_size
        self._features = torch.zeros(features, dtype=self._head.dtype, device=pool.device)
        self._graphs: dict[tuple[int, int, bool], Graph[Sequence[Tensor]]] = {}

    def recordings(self) -> list[Callable[[], object]]:
        sizes = [(batch, depth) for batch in reversed(self._batches) for depth in reversed(self._depths)]
        return [partial(self._record, *own, restricts) for own in sizes for restricts in (False, True)]

    def chains(
        self, requests: Sequence[Request], features: Sequence[Tensor], depths: Sequence[int]
    ) -> list[list[int]] | None:
        """`depths[b]` drafted tokens of each request, which has `features[b]` `[n, F]` to be read; None if no graph
        holds them.
        """
        if self._shape is not None:
            return None
        found = self._replay(requests, features, max(depths))
        if found is None:
            return None
        return [own[:count] for own, count in zip(found[0].tolist(), depths, strict=False)]

    def trees(
        self, requests: Sequence[Request], features: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """What `grow` answers for these requests, as deep as the shape goes; None if no graph holds them."""
        assert self._shape is not None
        found = self._replay(requests, features, self._shape.depth)
        if found is None:
            return None
        token, parent, level, score = found
        return token[: len(requests)], parent[: len(requests)], level, score[: len(requests)]

    def _replay(self, requests: Sequence[Request], features: Sequence[Tensor], deepest: int) -> Sequence[Tensor] | None:
        batch, depth = at_least(self._batches, len(requests)), at_least(self._depths, deepest)
        counts = [len(rows) for rows in features]
        if batch is None or depth is None or max(counts) > self._width:
            return None
        if max(len(own.tokens) for own in requests) + self._reach > self._longest:
            return None
        if any(own.constraint is not None or draws_laws(own) for own in requests):
            return None
        restricts = self._fill(batch, requests, counts)
        index = [b * self._width + row for b, count in enumerate(counts) for row in range(count)]
        self._features.index_copy_(0, torch.tensor(index, device=self._pool.device), torch.cat(list(features)))
        return self._graphs[batch, depth, restricts]()

    def _fields(self, flat: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        ids, numbers = flat[: batch * (self._width + NUMBERS)].split([batch * self._width, batch * NUMBERS])
        return ids.view(batch, self._width), numbers.view(NUMBERS, batch)

    def _fill(self, batch: int, requests: Sequence[Request], counts: Sequence[int]) -> bool:
        """Whether a row asks for top-k, top-p or min-p."""
        ids, numbers = self._fields(self._host, batch)
        ids.zero_()
        numbers.zero_()
        numbers[0] = self._pool.nobody
        numbers[1] = 1
        fractions = numbers[7:].view(torch.float64)
        fractions[1] = 1.0  # top-p
        for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
            start = request.computed - count
            ids[b, :count] = torch.tensor(request.tokens[start + 1 : start + count + 1])
            numbers[:4, b] = torch.tensor([request.slot, start + 1, count - 1, len(request.tokens) - 1])
        p = choice_parameters(requests, torch.device("cpu"), drafting=True)
        if p is not None:
            own = slice(len(requests))
            numbers[4, own], numbers[5, own], numbers[6, own] = p.top_k, p.seed_low, p.seed_high
            fractions[0, own], fractions[1, own], fractions[2, own] = p.temperature, p.top_p, p.min_p
        size = batch * (self._width + NUMBERS)
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        return p is not None and p.restricts

    def _record(self, batch: int, depth: int, restricts: bool) -> None:
        self._fill(batch, [], [])
        run = self._chain if self._shape is None else self._tree
        self._graphs[batch, depth, restricts] = Graph(partial(run, batch, depth, restricts), self._memory)

    def _chain(self, batch: int, depth: int, restricts: bool) -> tuple[Tensor]:
        """Target ids `[batch, depth]`."""
        state, slot, root, parameters = self._read(batch, restricts)
        drafted: list[Tensor] = []
        for level in range(depth):
            if level:
                rows = self._rows(slot, root + level, torch.zeros_like(root), 1)
                state = self._head.step(drafted[-1], state, rows.places - 1, self._attention(rows), level)
            draft_ids = self._proposer.draft_ids
            # slot i drafts what the target chooses at row i + 1
            drafted.append(draft_ids[choose(self._head.logits(state, level), parameters, root + level, draft_ids)])
        return (torch.stack(drafted, dim=1),)

    def _tree(self, batch: int, depth: int, restricts: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As infer.proposers.shapes.grow."""
        assert self._shape is not None
        state, slot, root, parameters = self._read(batch, restricts)

        def address(offsets: Tensor, words: Tensor) -> AttentionRows:
            width = words.shape[1]
            owner, place = slot.repeat_interleave(width), (root + 1).repeat_interleave(width)
            return self._rows(owner, place, offsets.repeat(batch), width, words.flatten())

        return grow(self._shape, depth, root, *self._proposer.growing(state, root, parameters, address))

    def _read(self, batch: int, restricts: bool) -> tuple[Tensor, Tensor, Tensor, ChoiceParameters]:
        """Runs the head over what waits to be read: each request's last state, row of the table, root, parameters."""
        ids, numbers = self._fields(self._device, batch)
        slot, first, last, root, top_k, low, high = numbers[:7]
        temperature, top_p, min_p = numbers[7:].view(torch.float64).float()
        parameters = ChoiceParameters(temperature, top_k, top_p, min_p, low, high, restricts)
        width, device = self._width, slot.device
        offset = torch.arange(width, device=device).repeat(batch)
        rows = self._rows(slot.repeat_interleave(width), first.repeat_interleave(width), offset, width)
        state = self._head.fuse(self._features[: batch * width].chunk(len(self._head.config.aux_layers), dim=-1))
        state = self._head.step(ids.flatten(), state, rows.places - 1, self._attention(rows), 0)
        return state[torch.arange(batch, device=device) * width + last], slot, root, parameters

    def _rows(
        self, slot: Tensor, committed: Tensor, offset: Tensor, width: int, words: Tensor | None = None
    ) -> AttentionRows:
        counts = (width,) * (len(slot) // width)
        size, longest = self._pool.page_size, self._longest
        return AttentionRows(self._pool.table, slot, committed, offset, words, size, longest, counts, first=1)

    def _attention(self, rows: AttentionRows) -> Attention:
        return self._proposer.attend(rows) if self._proposer.kv_layers else no_attention


def draws_laws(request: Request) -> bool:
    """Whether its drafts must say which law each token was drawn from (HeadProposer._laws)."""
    return request.params.acceptance == "block" and request.params.temperature > 0
