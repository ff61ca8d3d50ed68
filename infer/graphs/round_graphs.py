"""CUDA graphs of whole rounds: draft, forward, sample, verify and commit in one launch, on state kept on the device.

A round writes the inputs of the next one (ids and features of the accepted path, places, the root) in place, to the
tensors from which it read its own. So rounds of the same requests can follow each other without the host, which gets
each round's results by a small asynchronous copy and reads them later.

The host's changes between rounds are in stream order: a page added to a block table, or a dropped row, takes effect in
the rounds launched after the change and in none before. On a CPU a round runs when it is launched: the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infer.graphs.cuda_graph import Buckets, Graph, GraphMemory, at_least
from infer.kvcache.pool import KVPool
from infer.parallel.target_worker import Shard
from infer.request import Request
from infer.speculation.budget import Budget
from infer.speculation.draft_loop import Inputs, Unread, draft_loop
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.tree import MAX_NODES, DraftTree
from infer.speculation.tree_shapes import best_nodes
from kernels.choose import choose
from kernels.rows import AttentionRows
from kernels.verify import accept

UNREAD = 2  # maximum number of launched, unread rounds: one that may be running and the next one
NUM_FIELDS = 4  # columns of a result row after its tokens
LAST, DRAFTED, DEEPEST, PATH = range(NUM_FIELDS)


class Outcome(NamedTuple):
    """Result of one round for one request."""

    tokens: list[int]  # accepted tokens and the bonus token
    drafted: int  # number of nodes, the root excluded
    depth: int  # of the deepest node
    path: list[int]  # accepted nodes, the root excluded


class Launched(NamedTuple):
    """Results of a round being copied to the host. Read them before the second round after it reuses the buffer."""

    host: Tensor  # [B, W + NUM_FIELDS] tokens, of which the first row[LAST] + 1 are valid, then the columns above
    arrived: torch.cuda.Event | None

    def read(self) -> list[Outcome]:
        """Wait for the round and return the outcome of each row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        results = ((row[:-NUM_FIELDS], row[-NUM_FIELDS:]) for row in self.host.tolist())
        return [
            Outcome(tokens[: fields[LAST] + 1], fields[DRAFTED], fields[DEEPEST], nodes_of(fields[PATH]))
            for tokens, fields in results
        ]


class RoundGraphs:
    """One graph per batch size, budget and use of top-k, top-p or min-p.

    All requests of a round share the budget; NOTHING is plain decoding. Without a `proposer` nothing is drafted.
    """

    def __init__(
        self,
        shard: Shard,
        pool: KVPool,
        proposer: HeadProposer | None,
        buckets: Buckets,
        budgets: Sequence[Budget],
        memory: GraphMemory,
    ) -> None:
        self._shard, self._pool, self._memory, self.budgets = shard, pool, memory, tuple(budgets)
        self.proposer, self.longest = proposer, buckets.longest
        self._shape = None if proposer is None else proposer.shape
        self._aux = () if proposer is None else proposer.aux_layers
        self._loop = None if proposer is None else draft_loop(proposer, pool, buckets.longest)
        widest = max(map(self.rows, budgets))
        self.width = 1 + max(budget.depth for budget in budgets)  # longest path, which the head reads next
        # Places past the committed tokens that a round may write to, padding rows included.
        self.reach = self.width + max(widest, 0 if self._shape is None else 1 + self._shape.rows)
        self.batches = tuple(batch for batch in buckets.batches if batch * widest <= buckets.most)
        self.most_rows = widest * max(self.batches, default=0)
        max_batch, size = max(self.batches, default=0), 0 if proposer is None else proposer.feature_size
        device, pinned = pool.device, memory.pool is not None
        self._inputs = Inputs(pool, max_batch, self.width, size, shard.dtype, pinned=pinned)
        self._limit = torch.zeros(max_batch, dtype=torch.int64, device=device)  # [B] last position of each root
        self._before = torch.zeros(max_batch, self.width, size, dtype=shard.dtype, device=device)
        self._results = torch.zeros(max_batch, self.width + NUM_FIELDS, dtype=torch.int64, device=device)
        self._host = torch.zeros(UNREAD, *self._results.shape, dtype=torch.int64, pin_memory=pinned)
        self._graphs: dict[tuple[int, Budget, bool], Graph[None]] = {}
        self._key: tuple[int, Budget, bool] = 0, budgets[0], False
        self._turn = 0

    @property
    def drafter(self) -> str:
        return "none" if self.proposer is None else self.proposer.name

    def rows(self, budget: Budget) -> int:
        """Return the rows of one request in a verify, root included."""
        return 1 + (budget.nodes if self._shape is None else min(budget.nodes, self._shape.most))

    def recordings(self) -> list[Callable[[], object]]:
        sizes = [(batch, budget) for batch in reversed(self.batches) for budget in reversed(self.budgets)]
        return [partial(self._record, *size, restricts) for size in sizes for restricts in (False, True)]

    def batch_for(self, requests: int) -> int | None:
        """Return the batch size of the graph that holds so many requests; None if there is none."""
        return at_least(self.batches, requests)

    def load(self, requests: Sequence[Request], limits: Sequence[int], budget: Budget) -> None:
        """Load the state of these requests, whose roots go no further than `limits[b]`. Nothing may be in flight."""
        batch = self.batch_for(len(requests))
        assert batch is not None
        if self.proposer is None:
            features, bases = [self._before.new_zeros(1, 0)] * len(requests), [0] * len(requests)
        else:
            features, bases = self.proposer.features(requests), self.proposer.bases(requests)
        # Under the exact rule drafting uses the noise of the target's sampling, so both have the same parameters.
        assert all(request.rule == "exact" for request in requests)
        self._limit.copy_(torch.tensor([*limits] + [0] * (len(self._limit) - len(limits))))
        self._key = batch, budget, self._inputs.fill(batch, requests, features, bases)

    def launch(self) -> Launched:
        self._graphs[self._key]()
        batch, self._turn = self._key[0], (self._turn + 1) % UNREAD
        host = self._host[self._turn, :batch]
        host.copy_(self._results[:batch], non_blocking=True)
        arrived = None
        if self._memory.pool is not None:
            arrived = torch.cuda.Event()
            arrived.record()
        return Launched(host, arrived)

    def leave(self, row: int) -> None:
        """Stop the row of a finished request: with limit 0 its root no longer advances.

        Its block-table row is already zeroed, so later rounds write its KV to the null block.
        """
        self._limit[row] = 0

    def features(self, row: int, count: int, *, behind: bool) -> Tensor:
        """Return features `[count, F]` that the last launched round committed, or with `behind` the round before."""
        return (self._before if behind else self._inputs.features)[row, :count]

    def _record(self, batch: int, budget: Budget, restricts: bool) -> None:
        self._inputs.fill(batch)
        self._limit.zero_()
        fixed = on_device(DraftTree.chains([0] * batch, [[0] * budget.depth] * batch), self._pool.device)

        def run() -> None:
            unread = self._inputs.of(batch, restricts=restricts)
            tree = self._draft(unread, budget, fixed)
            choice, features = self._verify(unread, tree)
            last = accept(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, choice)
            depth = tree.depth.gather(1, last[:, None])[:, 0].long()
            path_mask = tree.ancestors.gather(1, last[:, None])
            self._results[:batch, -NUM_FIELDS + PATH] = path_mask[:, 0]
            if not tree.is_chain:
                path = paths(path_mask, choice.shape[1])[:, : 1 + budget.depth]
                choice = choice.gather(1, path)
                if features is not None:
                    features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
                self._bring_forward(unread, path, depth)
            self._results[:batch, -NUM_FIELDS + DRAFTED] = tree.length - 1
            self._results[:batch, -NUM_FIELDS + DEEPEST] = tree.depth.masked_fill(~tree.inside, 0).amax(1)
            self._commit(unread, choice, depth, features)

        self._graphs[batch, budget, restricts] = Graph(run, self._memory)

    def _draft(self, unread: Unread, budget: Budget, fixed: DraftTree) -> DraftTree:
        """Return the round's draft tree. `fixed`: a chain of this budget's depth, whose tokens are replaced."""
        root = unread.ids.gather(1, unread.last[:, None])
        if self._loop is None:
            return replace(fixed, token=root)
        if self._shape is None:
            return replace(fixed, token=torch.cat([root, self._loop.chain(unread, budget.depth)], dim=1))
        token, parent, _, score = self._loop.tree(unread)
        max_nodes = self.rows(budget) - 1
        fields = best_nodes(root[:, 0], token, parent, score, torch.full_like(unread.root, max_nodes), max_nodes)
        return DraftTree.assemble(*fields, deepest=budget.depth)

    def _verify(self, unread: Unread, tree: DraftTree) -> tuple[Tensor, Tensor | None]:
        """Run the target over all nodes. Returns the token sampled at each node `[B, N]` and features `[B, N, F]`."""
        batch, width = tree.token.shape
        owner = torch.arange(batch, device=unread.root.device).repeat_interleave(width)
        offset = torch.arange(width, device=unread.root.device).repeat(batch)
        rows = AttentionRows(
            self._pool.table,
            unread.slot[owner],
            unread.root[owner],
            offset,
            None if tree.is_chain else tree.ancestors.flatten(),
            self._pool.page_size,
            self.longest,
            (width,) * batch,
        )
        positions = rows.places if tree.is_chain else rows.committed + tree.depth.flatten()
        out = self._shard.forward(tree.token.flatten(), positions, rows, self._aux)
        chosen = choose(self._shard.logits(out.hidden), unread.parameters.rows(owner), positions)
        features = torch.cat(out.aux, dim=-1).unflatten(0, (batch, width)) if out.aux else None
        return chosen.view(batch, width), features

    def _bring_forward(self, unread: Unread, path: Tensor, depth: Tensor) -> None:
        """Move the KV of the accepted path `[B, W]`, `depth` `[B]` nodes beyond the root, to the front of its tree."""
        index = torch.arange(path.shape[1], device=path.device)
        source = torch.where(index <= depth[:, None], path, index)[:, 1:]
        table, size = self._pool.table[unread.slot], self._pool.page_size

        def slots(offset: Tensor) -> Tensor:
            place = unread.root[:, None] + offset
            return (table.gather(1, place // size) * size + place % size).flatten()

        self._pool.layers.move(slots(source), slots(index[1:].expand_as(source)))

    def _commit(self, unread: Unread, choice: Tensor, last: Tensor, features: Tensor | None) -> None:
        """Write the results, and the next round's inputs in place.

        `choice[:, i]`, sampled at node i of the path, equals the accepted token at node i + 1, or is the bonus token.
        """
        batch, width = choice.shape
        self._results[:batch, :width] = choice
        self._results[:batch, -NUM_FIELDS + LAST] = last
        unread.ids[:, :width] = choice
        if features is not None:
            self._before[:batch] = unread.features
            unread.features[:, :width] = features
        unread.first.copy_(unread.root + 1)
        unread.last.copy_(last)
        unread.root.copy_(torch.minimum(unread.root + last + 1, self._limit[:batch]))


def on_device(tree: DraftTree, device: torch.device) -> DraftTree:
    fields = (tree.token, tree.parent, tree.depth, tree.ancestors, tree.length)
    return DraftTree(*(field.contiguous().to(device) for field in fields), is_chain=tree.is_chain)


def nodes_of(mask: int) -> list[int]:
    """Return the nodes whose bits are set, ascending, the root excluded."""
    return [node for node in range(1, MAX_NODES) if mask >> node & 1]


def paths(masks: Tensor, width: int) -> Tensor:
    """Return nodes `[B, width]`: first those whose bits are set in `masks` `[B, 1]`, then the rest, each ascending."""
    node = torch.arange(width, device=masks.device)
    return torch.where((masks >> node & 1) > 0, node, node + width).sort(dim=1).indices
