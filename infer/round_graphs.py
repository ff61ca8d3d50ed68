"""Whole rounds by CUDA graphs: draft, forward, choose, verify and commit in one launch, from state that stays there.

A round leaves what the next one begins with in the tensors that it read it from: ids and features of the accepted path,
places, the root. So rounds of the same requests can follow each other without the host, which hears of each through
a small copy and looks at it when it likes. A chain's accepted path lies where it belongs; nothing is moved.

What the host changes between rounds it changes in stream order: a page that is added to a table, or a row that is left,
is met by the rounds launched after it and by none before. On a CPU a round runs at its launch: the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infer.draft_loop import Inputs, Unread, draft_loop
from infer.graphs import Buckets, Graph, GraphMemory, at_least
from infer.kv_cache import KVPool
from infer.proposers.head import HeadProposer
from infer.request import Request
from infer.shard import Shard
from infer.tree import DraftTree
from kernels.choose import choose
from kernels.rows import AttentionRows
from kernels.verify import accept

UNREAD = 2  # rounds launched and not yet read, at most: one that may run and the one that follows it


class Launched(NamedTuple):
    """A round's answer on its way to the host. To be read before the next round but one is launched."""

    host: Tensor  # [B, W + 1] the choice at every row of a request, and the last accepted row
    arrived: torch.cuda.Event | None

    def read(self) -> list[list[int]]:
        """The tokens of each request's accepted path and its bonus token. Waits for the round."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [chosen[: last + 1] for *chosen, last in self.host.tolist()]


class RoundGraphs:
    """One graph per number of requests and depth of their chains (0 is plain decoding); for rows that ask for top-k,
    top-p or min-p, and for those that don't. `proposer` None: depth 0 alone.
    """

    def __init__(
        self,
        shard: Shard,
        pool: KVPool,
        proposer: HeadProposer | None,
        buckets: Buckets,
        depths: Sequence[int],
        memory: GraphMemory,
    ) -> None:
        self._shard, self._pool, self._memory, self.depths = shard, pool, memory, tuple(sorted(depths))
        self.proposer, self.longest = proposer, buckets.longest
        self._aux = () if proposer is None else proposer.aux_layers
        self._loop = None if proposer is None else draft_loop(proposer, pool, buckets.longest)
        self.width = 1 + max(depths)  # rows of a request in a round, and rows of the head that wait to be read
        self.reach = 2 * self.width  # places past the tokens that a round writes to: those of padding rows too
        self.batches = tuple(batch for batch in buckets.batches if batch * self.width <= buckets.most)
        most, size = max(self.batches, default=0), 0 if proposer is None else proposer.feature_size
        self._inputs = Inputs(pool, most, self.width, size, shard.dtype, pinned=memory.pool is not None)
        self._limit = torch.zeros(most, dtype=torch.int64, device=pool.device)  # the root goes no further
        self._before = torch.zeros(most, self.width, size, dtype=shard.dtype, device=pool.device)
        self._answer = torch.zeros(most, self.width + 1, dtype=torch.int64, device=pool.device)
        self._host = torch.zeros(UNREAD, most, self.width + 1, dtype=torch.int64, pin_memory=memory.pool is not None)
        self._graphs: dict[tuple[int, int, bool], Graph[None]] = {}
        self._key = 0, 0, False
        self._turn = 0

    def recordings(self) -> list[Callable[[], object]]:
        sizes = [(batch, depth) for batch in reversed(self.batches) for depth in reversed(self.depths)]
        return [partial(self._record, *own, restricts) for own in sizes for restricts in (False, True)]

    def batch_for(self, requests: int) -> int | None:
        """Requests of the graph that as many run in."""
        return at_least(self.batches, requests)

    def load(self, requests: Sequence[Request], limits: Sequence[int], depth: int) -> None:
        """Makes the state these requests', of which no root goes past `limits[b]`. Nothing may be in flight."""
        batch = self.batch_for(len(requests))
        assert batch is not None
        if self.proposer is None:
            features, bases = [self._before.new_zeros(1, 0)] * len(requests), [0] * len(requests)
        else:
            features, bases = self.proposer.features(requests), self.proposer.bases(requests)
        self._limit.copy_(torch.tensor([*limits] + [0] * (len(self._limit) - len(limits))))
        self._key = batch, depth, self._inputs.fill(batch, requests, features, bases)

    def launch(self) -> Launched:
        self._graphs[self._key]()
        batch, self._turn = self._key[0], (self._turn + 1) % UNREAD
        host = self._host[self._turn, :batch]
        host.copy_(self._answer[:batch], non_blocking=True)
        arrived = None
        if self._memory.pool is not None:
            arrived = torch.cuda.Event()
            arrived.record()
        return Launched(host, arrived)

    def leave(self, row: int) -> None:
        """The request of this row has ended: what is launched from now on knows nothing of it."""
        self._limit[row] = 0
        self._inputs.leave(self._key[0], row)

    def features(self, row: int, count: int, *, behind: bool) -> Tensor:
        """`[count, F]` of the positions that the round launched last committed, or with `behind` the one before it."""
        return (self._before if behind else self._inputs.features)[row, :count]

    def _record(self, batch: int, depth: int, restricts: bool) -> None:
        self._inputs.fill(batch)
        self._limit.zero_()
        shape = DraftTree.chains([0] * batch, [[0] * depth] * batch)
        fields = (shape.parent, shape.depth, shape.ancestors, shape.length)
        parent, level, ancestors, length = (field.contiguous().to(self._pool.device) for field in fields)

        def run() -> None:
            own = self._inputs.of(batch, restricts=restricts)
            tokens = own.ids.gather(1, own.last[:, None])
            if depth:
                assert self._loop is not None
                tokens = torch.cat([tokens, self._loop.chain(own, depth)], dim=1)
            choice, features = self._judge(own, tokens)
            self._commit(own, choice, accept(tokens, parent, level, ancestors, length, choice), features)

        self._graphs[batch, depth, restricts] = Graph(run, self._memory)

    def _judge(self, own: Unread, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target over tokens `[B, N]` of each chain: its choice at every row `[B, N]`, features `[B, N, F]`."""
        batch, width = tokens.shape
        owner = torch.arange(batch, device=tokens.device).repeat_interleave(width)
        offset = torch.arange(width, device=tokens.device).repeat(batch)
        rows = AttentionRows(
            self._pool.table,
            own.slot[owner],
            own.root[owner],
            offset,
            None,
            self._pool.page_size,
            self.longest,
            (width,) * batch,
        )
        out = self._shard.forward(tokens.flatten(), rows.places, rows, self._aux)
        chosen = choose(self._shard.logits(out.hidden), own.parameters.rows(owner), rows.places)
        features = torch.cat(out.aux, dim=-1).unflatten(0, (batch, width)) if out.aux else None
        return chosen.view(batch, width), features

    def _commit(self, own: Unread, choice: Tensor, last: Tensor, features: Tensor | None) -> None:
        """The next round's beginning, in place. An accepted token is the choice at the row before it."""
        batch, width = choice.shape
        self._answer[:batch, :width] = choice
        self._answer[:batch, -1] = last
        own.ids[:, :width] = choice
        if features is not None:
            self._before[:batch] = own.features
            own.features[:, :width] = features
        own.first.copy_(own.root + 1)
        own.last.copy_(last)
        own.root.copy_(torch.minimum(own.root + last + 1, self._limit[:batch]))
