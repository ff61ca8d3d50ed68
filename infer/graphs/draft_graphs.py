"""A head's drafts by CUDA graphs: what it reads, and every token it drafts, in one launch and one answer.

The rows that it reads are padded (infer/speculation/draft_loop.py). Every request is drafted for as deep as the graph
goes; what its budget does not hold is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from infer.graphs.cuda_graph import Buckets, Graph, GraphMemory, at_least, doubling
from infer.kvcache.pool import KVPool
from infer.request import Request
from infer.speculation.draft_loop import Inputs, draft_loop
from infer.speculation.proposers.head import HeadProposer


class DraftGraphs:
    """One graph per number of requests and, for chains, depth; for rows that ask for top-k, top-p or min-p, and for
    those that don't.

    `deepest`: tokens that the proposer may draft one after the other; as many rows and one more can wait to be read.
    """

    def __init__(
        self, proposer: HeadProposer, pool: KVPool, buckets: Buckets, deepest: int, memory: GraphMemory
    ) -> None:
        self._memory, self._longest, self._shape = memory, buckets.longest, proposer.shape
        self._loop = draft_loop(proposer, pool, buckets.longest)
        self._depths = doubling(deepest) if self._shape is None else (self._shape.depth,)
        self._width = deepest + 1 if proposer.kv_layers else 1  # rows that are read, at most
        # Places past the tokens: those of padding rows too.
        self._reach = self._width + max(deepest, 0 if self._shape is None else self._shape.rows)
        self._batches = tuple(batch for batch in buckets.batches if batch * self._width <= buckets.most)
        # The host fills them between drafts, of which every one ends by waiting for its tokens.
        self._inputs = Inputs(
            pool,
            max(self._batches, default=0),
            self._width,
            proposer.feature_size,
            proposer.module.dtype,
            pinned=memory.pool is not None,
        )
        self._graphs: dict[tuple[int, int, bool], Graph[Sequence[Tensor]]] = {}

    def recordings(self) -> list[Callable[[], object]]:
        sizes = [(batch, depth) for batch in reversed(self._batches) for depth in reversed(self._depths)]
        return [partial(self._record, *own, restricts) for own in sizes for restricts in (False, True)]

    def chains(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int], depths: Sequence[int]
    ) -> list[list[int]] | None:
        """`depths[b]` drafted tokens of each request, which has `features[b]` `[n, F]` to be read; None if no graph
        holds them.
        """
        if self._shape is not None:
            return None
        found = self._replay(requests, features, bases, max(depths))
        if found is None:
            return None
        return [own[:count] for own, count in zip(found[0].tolist(), depths, strict=False)]

    def trees(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """What `grow` answers for these requests, as deep as the shape goes; None if no graph holds them."""
        assert self._shape is not None
        found = self._replay(requests, features, bases, self._shape.depth)
        if found is None:
            return None
        token, parent, level, score = found
        return token[: len(requests)], parent[: len(requests)], level, score[: len(requests)]

    def _replay(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int], deepest: int
    ) -> Sequence[Tensor] | None:
        batch, depth = at_least(self._batches, len(requests)), at_least(self._depths, deepest)
        if batch is None or depth is None or max(map(len, features)) > self._width:
            return None
        if max(len(own.tokens) for own in requests) + self._reach > self._longest:
            return None
        if any(own.constraint is not None or draws_laws(own) for own in requests):
            return None
        return self._graphs[batch, depth, self._inputs.fill(batch, requests, features, bases)]()

    def _record(self, batch: int, depth: int, restricts: bool) -> None:
        self._inputs.fill(batch)

        def run() -> Sequence[Tensor]:
            own = self._inputs.of(batch, restricts=restricts)
            return (self._loop.chain(own, depth),) if self._shape is None else self._loop.tree(own)

        self._graphs[batch, depth, restricts] = Graph(run, self._memory)


def draws_laws(request: Request) -> bool:
    """Whether its drafts must say which law each token was drawn from (HeadProposer._laws)."""
    return request.params.acceptance == "block" and request.params.temperature > 0
