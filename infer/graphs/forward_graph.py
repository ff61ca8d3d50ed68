"""CUDA graphs of the target's forward alone, for the decode steps that the host runs.

The host runs a step if a request needs it (logprobs, penalties, a grammar, an acceptance rule that gives something up),
if a prompt is prefilled beside, or if the proposer drafts on the host. Drafts, choices and verification are then the
host's; the forward between them launches the same kernels on the same shapes in every step, so it is captured.

Requests are padded to a batch size, and each tree to a number of nodes. Padding requests use the null block. Padding
nodes write past the tree, where KV counts as free, and no row sees them: the rows of the trees have the bits that they
have without padding. Where steps that need no host are captured as a whole (step_graph.py), these are the exception,
and every second batch size is captured for them: most of a step of few rows is reading the weights, whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.graphs.cuda_graph import Graph, GraphMemory, at_least, every_second
from infer.request import Request
from infer.steps.runner import Rows, Runner
from kernels.copies import upload
from kernels.rows import AttentionRows


class ForwardGraphs:
    """One graph per batch size and width: trees of one node, and of all that `limit` allows.

    `aux`: hidden states of the target that a drafter reads. `longest`: bound on the number of keys that a row attends
    to. `most_rows`: of all requests. `rare`: every second batch size suffices.
    """

    def __init__(
        self,
        runner: Runner,
        aux: Sequence[int],
        limit: Budget,
        batches: Sequence[int],
        longest: int,
        most_rows: int,
        memory: GraphMemory,
        *,
        rare: bool,
    ) -> None:
        self._runner, self._pool, self._aux, self._limit, self._memory = runner, runner.pool, tuple(aux), limit, memory
        self._widths, self._longest = sorted({1, 1 + limit.nodes}), longest
        fitting = {width: [batch for batch in batches if batch * width <= most_rows] for width in self._widths}
        self._batches = {width: every_second(sizes) if rare else sizes for width, sizes in fitting.items()}
        self.sizes = [(batch, width) for width, sizes in self._batches.items() for batch in sizes]
        # Slot and root's position of each request; token, depth and tree mask of each node. Even counts, so that each
        # field begins at a multiple of 16 bytes.
        most = max(batch for batch, _ in self.sizes), max(batch * width for batch, width in self.sizes)
        self._requests, self._nodes = (count + count % 2 for count in most)
        self._inputs = torch.zeros(2 * self._requests + 3 * self._nodes, dtype=torch.int64, device=self._pool.device)
        self._graphs: dict[tuple[int, int], Graph[Rows]] = {}

    def recordings(self) -> list[Callable[[], object]]:
        """Return the captures, largest first, so that smaller graphs can reuse the memory of larger ones."""
        largest_first = sorted(self.sizes, key=lambda size: size[0] * size[1], reverse=True)
        return [partial(self._record, *size) for size in largest_first]

    def replay(self, tree: DraftTree, requests: Sequence[Request], aux: Sequence[int]) -> Rows | None:
        """Run the target over all nodes of a tree that lies on the host. None, with nothing done, if no graph fits.

        The result is valid until another graph of the same memory is replayed.
        """
        size = self._size_for(tree, requests)
        if size is None or (aux and tuple(aux) != self._aux):
            return None
        batch, width = size
        on_host = torch.zeros(len(self._inputs), dtype=torch.int64, pin_memory=self._memory.pool is not None)
        self._pad(on_host, *size)
        self._fill(on_host, tree, requests, *size)
        index: slice | Tensor = slice(tree.token.numel())  # of the rows that are no padding
        if tree.token.shape[1] < width or not tree.full:
            node = torch.arange(batch * width).view(batch, width)[: len(requests), : tree.token.shape[1]]
            index = upload(node[tree.inside].tolist(), self._pool.device)
        self._inputs.copy_(on_host, non_blocking=True)
        rows = self._graphs[size]()
        kept = tuple(states[index] for states in rows.aux) if aux else ()
        return Rows(rows.hidden[index], kept, rows.positions[index])

    def _size_for(self, tree: DraftTree, requests: Sequence[Request]) -> tuple[int, int] | None:
        width = at_least(self._widths, tree.token.shape[1])
        batch = None if width is None else at_least(self._batches[width], len(requests))
        if batch is None or width is None:
            return None
        if not tree.is_chain and self._is_chain(width) and tree.token.shape[1] > 1:
            return None
        ends = max(request.computed for request in requests) + width
        return (batch, width) if ends <= self._longest else None

    def _is_chain(self, width: int) -> bool:
        """Return whether the graphs of this width run chains, which need no tree mask."""
        return width == 1 or self._limit.is_chain

    def _pad(self, inputs: Tensor, batch: int, width: int) -> None:
        """Make all requests padding, whose nodes see a root: without a key, attention would give no number."""
        of_requests, of_nodes = self._fields(inputs, batch, width)
        of_requests[0], of_requests[1], of_nodes[2] = self._pool.null_row, 0, 1

    def _fill(self, inputs: Tensor, tree: DraftTree, requests: Sequence[Request], batch: int, width: int) -> None:
        of_requests, of_nodes = self._fields(inputs, batch, width)
        columns = [[request.table_row for request in requests], [request.computed for request in requests]]
        of_requests[:, : len(requests)] = torch.tensor(columns)
        nodes = torch.stack([tree.token, tree.depth, tree.ancestors])
        if not tree.full:
            nodes = nodes.where(tree.inside, torch.tensor([0, 0, 1])[:, None, None])
        of_nodes[:, : len(requests), : tree.token.shape[1]] = nodes

    def _fields(self, inputs: Tensor, batch: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the requests' fields `[2, B]` and the nodes' `[3, B, N]`, as views of the inputs."""
        requests, nodes = inputs.split([2 * self._requests, 3 * self._nodes])
        of_nodes = nodes.view(3, -1)[:, : batch * width].unflatten(1, (batch, width))
        return requests.view(2, -1)[:, :batch], of_nodes

    def _record(self, batch: int, width: int) -> None:
        def run() -> Rows:
            (slots, roots), (token, depth, tree_mask) = self._fields(self._inputs, batch, width)
            sizes = {"page_size": self._pool.page_size, "longest": self._longest}
            depths, masks = (None, None) if self._is_chain(width) else (depth.flatten(), tree_mask)
            rows = AttentionRows.grid(self._pool.table, slots, roots, width, **sizes, tree_mask=masks)
            return self._runner.forward(token.flatten(), rows, self._aux, depths)

        # Else the null block would be left with keys that are no numbers, which requests that have ended read.
        self._pad(self._inputs.zero_(), batch, width)
        self._graphs[batch, width] = Graph(run, self._memory)
