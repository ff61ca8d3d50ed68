"""CUDA graphs of a head's drafting: the head's forward over unread rows and all drafted levels in one launch.

The unread rows are padded (infer/speculation/draft_loop.py). Every request is drafted to the full depth of the graph;
tokens beyond its budget are discarded.
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
    """One graph per batch size, depth (of chains) and use of top-k, top-p or min-p.

    `deepest`: maximum depth of a draft. A request can have up to `deepest` + 1 unread rows.
    """

    def __init__(
        self, proposer: HeadProposer, pool: KVPool, buckets: Buckets, deepest: int, memory: GraphMemory
    ) -> None:
        self._memory, self._longest, self._shape = memory, buckets.longest, proposer.shape
        self._loop = draft_loop(proposer, pool, buckets.longest)
        self._depths = doubling(deepest) if self._shape is None else (self._shape.depth,)
        self._width = deepest + 1 if proposer.kv_layers else 1  # maximum number of unread rows of a request
        # Places past the committed tokens that a draft may write to, padding rows included.
        self._reach = self._width + max(deepest, 0 if self._shape is None else self._shape.rows)
        self._batches = tuple(batch for batch in buckets.batches if batch * self._width <= buckets.most)
        # The host may fill these between drafts, since every draft ends by waiting for its tokens.
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
        return [partial(self._record, *size, restricts) for size in sizes for restricts in (False, True)]

    def chains(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int], depths: Sequence[int]
    ) -> list[list[int]] | None:
        """Draft `depths[b]` tokens for each request; return None if no graph fits.

        `features[b]` `[n, F]`: features of its unread positions.
        """
        if self._shape is not None:
            return None
        outputs = self._replay(requests, features, bases, max(depths))
        if outputs is None:
            return None
        return [tokens[:count] for tokens, count in zip(outputs[0].tolist(), depths, strict=False)]

    def trees(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return the result of `grow` for these requests, to the depth of the shape; None if no graph fits."""
        assert self._shape is not None
        outputs = self._replay(requests, features, bases, self._shape.depth)
        if outputs is None:
            return None
        token, parent, level, score = outputs
        return token[: len(requests)], parent[: len(requests)], level, score[: len(requests)]

    def _replay(
        self, requests: Sequence[Request], features: Sequence[Tensor], bases: Sequence[int], deepest: int
    ) -> Sequence[Tensor] | None:
        batch, depth = at_least(self._batches, len(requests)), at_least(self._depths, deepest)
        if batch is None or depth is None or max(map(len, features)) > self._width:
            return None
        if max(len(request.tokens) for request in requests) + self._reach > self._longest:
            return None
        if any(request.constraint is not None or needs_draft_probs(request) for request in requests):
            return None
        return self._graphs[batch, depth, self._inputs.fill(batch, requests, features, bases)]()

    def _record(self, batch: int, depth: int, restricts: bool) -> None:
        self._inputs.fill(batch)

        def run() -> Sequence[Tensor]:
            unread = self._inputs.of(batch, restricts=restricts)
            return (self._loop.chain(unread, depth),) if self._shape is None else self._loop.tree(unread)

        self._graphs[batch, depth, restricts] = Graph(run, self._memory)


def needs_draft_probs(request: Request) -> bool:
    """Return whether drafts must include the distribution each token was drawn from (HeadProposer._laws)."""
    return request.params.acceptance == "block" and request.params.temperature > 0
