"""CUDA graphs of decode steps: draft, forward, choose, verify and commit in one launch, on state kept on the device.

A graph captures the drafts of a head's loop and `Runner.decode`, the same body as that of steps that the host runs. In
those the drafts alone are replayed, by a graph of their own on the same state, and the forward (forward_graph.py). It
serves a batch size, and drafts at most the largest budget: how much each request drafts is a tensor. A step writes the
inputs of the next one (ids and features of the accepted path, the root) in place, to the tensors from which it read its
own. So steps of the same requests can follow each other without the host, which gets each step's results by a small
asynchronous copy and reads them later (overlap.py).

Limits of sampling (top-k, top-p, min-p) are tensors too. Of bf16 logits their search is eleven launches that end at
once for a greedy row: 1 to 2 us each. A plain step has one, so one graph serves all: at most 22 of some 5,000 us (an 8B
target in bf16, H100). A step that drafts has one at each level too, and a second graph without. A draft alone has one
graph again: three levels, 33 launches, beside the work of the host.

The host's changes between steps are in stream order: a page added to a block table, a budget or a dropped row takes
effect in the steps launched after the change and in none before. On a CPU a step runs when it is launched: the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infer.batch.tree import NOTHING, Budget, DraftTree
from infer.config import EngineConfig
from infer.graphs.cuda_graph import Graph, GraphMemory, at_least, doubling, every_second
from infer.graphs.forward_graph import ForwardGraphs
from infer.graphs.step_state import UNREAD, GraphBatch, StepState
from infer.kvcache.memory import MIB
from infer.processes.target_worker import Shard
from infer.request import PLAIN, Proposer, Request
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit, exit_rows, num_terms
from infer.speculation.proposers.head import HeadProposer, HeadState
from infer.steps.runner import Decoded, Runner
from kernels.copies import gather_rows
from kernels.dispatch import uses_triton
from kernels.operands import ALL_LIMITS, LEADING, NO_LIMITS, Limits
from kernels.tree import best_nodes

MAX_CONTEXT = 32768  # tokens of the longest request that graphs serve; attention is launched for as many keys


class Outcome(NamedTuple):
    """Result of a step for one request."""

    tokens: list[int]  # accepted tokens and the bonus token
    drafted: int  # number of nodes, the root excluded
    depth: int  # of the deepest node
    path: list[int]  # accepted nodes, the root excluded
    log_probs: list[float]  # of a chain's drafted tokens, where it may exit early


class Launched(NamedTuple):
    """Results of a step being copied to the host. Read them before the second step after it reuses the buffer."""

    host: Tensor  # [B, LEADING + 2 W] results (kernels/advance.py)
    log_probs: Tensor  # [B, D], D = 0 without early exit
    arrived: torch.cuda.Event | None
    budgets: Sequence[Budget]  # of the requests, by row

    def read(self) -> list[Outcome]:
        """Wait for the step and return the outcome of each row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        width, outcomes = (self.host.shape[1] - LEADING) // 2, list[Outcome]()
        for row, values in zip(self.host.tolist(), self.log_probs.tolist(), strict=True):
            drafted, deepest, accepted = row[:LEADING]
            tokens = row[LEADING : LEADING + accepted + 1]
            path = row[LEADING + width + 1 : LEADING + width + accepted + 1]
            outcomes.append(Outcome(tokens, drafted, deepest, path, values[:drafted]))
        return outcomes


class StepGraphs:
    """One graph per batch size, of steps with drafts two: without the search for limits and with it; and of some batch
    sizes one of the drafts alone. Without a `proposer` nothing is drafted.

    `limit`: the largest budget of a request. `longest`: bound on the number of keys that a row attends to. `most_rows`:
    of all requests in a verify. `early_exit`: chains exit early if the proposer's `confidence` says so.
    """

    def __init__(
        self,
        runner: Runner,
        proposer: HeadProposer | None,
        limit: Budget,
        batches: Sequence[int],
        longest: int,
        most_rows: int,
        memory: GraphMemory,
        *,
        early_exit: bool,
    ) -> None:
        self._runner, self._memory, self.proposer, self.limit, self.longest = runner, memory, proposer, limit, longest
        shape = self._shape = None if proposer is None else proposer.shape
        self._most_nodes = limit.nodes if shape is None else min(limit.nodes, shape.most)
        self._aux = () if proposer is None else proposer.needs.aux_layers
        self.width = 1 + limit.depth  # longest path, which the head reads next
        spare = 0 if proposer is None else proposer.loop.spare_rows(limit.depth)
        widest = 1 + self._most_nodes
        # Places past the committed tokens that a step may write to, padding rows included.
        scratch = 0 if proposer is None else proposer.places(limit)
        self.reach = self.width + max(widest, spare, 1 + scratch)
        self.batches = tuple(batch for batch in batches if batch * widest <= most_rows)
        self.most_rows = widest * max(self.batches, default=0)
        size, batch = 0 if proposer is None else proposer.feature_size, max(self.batches, default=0)
        pinned, dtype = memory.pool is not None, runner.shard.dtype
        self._scored = limit.depth if early_exit and proposer is not None and shape is None else 0  # levels
        terms = num_terms(self._scored)
        self._state = StepState(runner.pool, batch, self.width, spare, size, terms, dtype, pinned=pinned)
        self._log_probs = torch.zeros(batch, self._scored, device=runner.pool.device)
        self._host = torch.zeros(UNREAD, *self._state.results.shape, dtype=torch.int64, pin_memory=pinned)
        self._host_log_probs = torch.zeros(UNREAD, *self._log_probs.shape, pin_memory=pinned)
        self._graphs: dict[tuple[int, Limits], Graph[None]] = {}
        self._searches = (ALL_LIMITS,) if proposer is None else (NO_LIMITS, ALL_LIMITS)
        self._drafts: dict[int, Graph[Tensor]] = {}  # by batch size, without what follows a draft
        self._draft_batches = () if proposer is None else every_second(self.batches)
        self._key, self._turn, self._budgets = (0, NO_LIMITS), 0, list[Budget]()

    @property
    def drafter(self) -> str:
        return "none" if self.proposer is None else self.proposer.name

    def recordings(self) -> list[Callable[[], object]]:
        """Return the captures, largest first, so that smaller graphs can reuse the memory of larger ones."""
        steps = [partial(self._record, batch, limits) for batch in self.batches[::-1] for limits in self._searches]
        return [*steps, *(partial(self._record_draft, batch) for batch in self._draft_batches[::-1])]

    def batch_for(self, requests: int) -> int | None:
        """Return the batch size of the graph that holds so many requests; None if there is none."""
        return at_least(self.batches, requests)

    def load(
        self,
        requests: Sequence[Request],
        states: Sequence[HeadState | None],
        limits: Sequence[int],
        budgets: Sequence[Budget],
        batch: int | None = None,
    ) -> None:
        """Load these requests, whose roots go no further than `limits[b]`. Nothing may be in flight.

        `states`: what the head keeps of each; None of one that it does not follow. `batch`: padded to, by default what
        `batch_for` returns.
        """
        batch = batch or self.batch_for(len(requests))
        assert batch is not None
        nothing = self._state.features.new_zeros(1, self._state.features.shape[-1])
        features = [nothing if state is None or state.pending is None else state.rows for state in states]
        bases = [0 if state is None else state.base for state in states]
        used = self._state.load(batch, requests, features, bases, limits)
        self._key = batch, self._searches[0] if used == NO_LIMITS else ALL_LIMITS
        self._budgets = []
        self.set_budgets(requests, budgets)

    def set_budgets(self, requests: Sequence[Request | None], budgets: Sequence[Budget]) -> None:
        """Set how much is drafted in each row from the next launch on; None for a finished request."""
        confidence = self.proposer.confidence if self.proposer is not None and self._scored else None
        if confidence is None and self._budgets == budgets:
            return
        self._budgets = list(budgets)
        depths = [budget.depth for budget in budgets]
        parallel = self.proposer is not None and self.proposer.loop.one_forward
        terms = torch.tensor(exit_rows(confidence, requests, depths, self._scored, parallel=parallel))
        self._state.set_budgets(budgets, terms, self._turn)

    def launch(self) -> Launched:
        self._graphs[self._key]()
        batch, self._turn = self._key[0], (self._turn + 1) % UNREAD
        host = self._host[self._turn, :batch]
        host.copy_(self._state.results[:batch], non_blocking=True)
        log_probs = self._host_log_probs[self._turn, :batch]
        log_probs.copy_(self._log_probs[:batch], non_blocking=True)
        arrived = None
        if self._memory.pool is not None:
            arrived = torch.cuda.Event()
            arrived.record()
        return Launched(host, log_probs, arrived, self._budgets)

    def draft(
        self, requests: Sequence[Request], states: Sequence[HeadState], budgets: Sequence[Budget]
    ) -> tuple[DraftTree, list[list[float]]] | None:
        """Draft for a step that the host runs. Nothing may be in flight: the state is that of these requests then.

        Returns a tree on the host, and log-probabilities as in an Outcome. None, with nothing done, if the requests or
        what the head has not read of them fit no graph.
        """
        assert self.proposer is not None
        unread = max(len(state.rows) for state in states)
        ends = max(len(request.tokens) for request in requests) + self.reach
        batch = at_least(self._draft_batches, len(requests))
        if batch is None or unread > self.width or ends > self.longest:
            return None
        if any(budget.nodes > self.limit.nodes or budget.depth > self.limit.depth for budget in budgets):
            return None
        self.load(requests, states, [len(request.tokens) - 1 for request in requests], budgets, batch)
        fields = self._drafts[batch]()[:, : len(requests)].cpu()
        token, parent, depth, ancestors = fields[1:].unflatten(0, (4, -1)).transpose(1, 2)
        length = fields[0]
        width = int(length.max())
        columns = token[:, :width], parent[:, :width].int(), depth[:, :width].int(), ancestors[:, :width], length
        log_probs = self._log_probs[: len(requests)].tolist() if self._scored else [[] for _ in requests]
        drafted = [values[: count - 1] for values, count in zip(log_probs, length.tolist(), strict=True)]
        return DraftTree(*columns, is_chain=self._shape is None, max_depth=self.limit.depth), drafted

    def leave(self, row: int) -> None:
        """Stop the row of a finished request: its root no longer advances.

        Its block-table row is already zeroed, so later steps write its KV to the null block.
        """
        self._state.limit[row : row + 1] = 0  # one element would be copied from the host, which would wait for it

    def features(self, row: int, count: int, *, behind: bool) -> Tensor:
        """Return features `[count, F]` that the last launched step committed, or with `behind` the step before."""
        return (self._state.before if behind else self._state.features)[row, :count]

    def _record(self, batch: int, limits: Limits) -> None:
        self._state.load(batch)

        def run() -> None:
            rows = self._state.of(batch, self.longest, limits)
            tree = self._draft(rows)
            decoded = self._runner.decode(tree, rows, self._aux)
            if decoded.aux:
                self._keep_features(rows, tree, decoded)

        self._graphs[batch, limits] = Graph(run, self._memory)

    def _record_draft(self, batch: int) -> None:
        self._state.load(batch)

        def run() -> Tensor:
            tree = self._draft(self._state.of(batch, self.longest, ALL_LIMITS))
            fields = (tree.length[:, None], tree.token, tree.parent, tree.depth, tree.ancestors)
            return torch.cat([field.long() for field in fields], dim=1).T.contiguous()

        self._drafts[batch] = Graph(run, self._memory)

    def _draft(self, rows: GraphBatch) -> DraftTree:
        root, proposer = rows.root_tokens, self.proposer
        if proposer is None:
            return DraftTree.chain(root, root[:, None][:, :0], torch.zeros_like(root), padded=True)
        unread = rows.unread(kv=bool(proposer.needs.kv_layers))
        if self._shape is None:
            early_exit = EarlyExit(rows.exit_terms, rows.depth) if self._scored else None
            chains = proposer.loop.chain(unread, rows.depth, self.limit.depth, early_exit)
            if chains.log_probs is not None:
                self._log_probs[: len(root)] = chains.log_probs
            return DraftTree.chain(root, chains.token, chains.length, padded=True)
        grown = proposer.loop.tree(unread, self._shape, self._shape.depth)
        fields = best_nodes(root, grown, rows.nodes, rows.depth, self._most_nodes, self.limit.depth)
        return DraftTree(*fields, padded=True, max_depth=self.limit.depth)

    def _keep_features(self, rows: GraphBatch, tree: DraftTree, decoded: Decoded) -> None:
        """Keep the features of the accepted paths for the next step, and the host's of this one."""
        (batch, width), path = tree.token.shape, decoded.accepted.path
        if tree.is_chain:
            features = torch.cat(decoded.aux, dim=-1)
        else:
            first = torch.arange(0, batch * width, width, device=path.device)
            features = gather_rows(decoded.aux, (first[:, None] + path).flatten())
        self._state.before[:batch] = rows.features[:, : self.width]
        rows.features[:, : path.shape[1]] = features.unflatten(0, path.shape)


class Recorded(NamedTuple):
    count: int
    bytes: int  # of GPU memory, out of the planned workspace of a step
    graphs: tuple[StepGraphs, ...]  # of whole steps, for one drafter each, or plain decoding

    def __str__(self) -> str:
        return f"{self.count} graphs of decode steps, {self.bytes / MIB:.0f} MiB"


def wants_graphs(config: EngineConfig, shard: Shard) -> bool:
    if config.graphs == "off" or (config.graphs == "auto" and shard.device.type != "cuda"):
        return False
    reason = unsupported_reason(shard)
    if reason and config.graphs == "on":
        raise ValueError(f"engine.graphs=on: {reason}; engine.graphs=auto runs without")
    return reason is None


def unsupported_reason(shard: Shard) -> str | None:
    """Return why the target's steps cannot be captured; None if they can."""
    if shard.target.config.experts is not None:
        return "which experts this target runs is decided by the host"
    if shard.target.config.recurrent is not None:
        return "the host advances the states of this target's recurrent layers"
    if shard.ranks > 1:
        return "the ranks of a divided target are led by the host"
    if shard.device.type == "cuda" and not uses_triton(shard.device):
        return "the torch forms of the kernels ask the host for sizes (HEADWAY_KERNELS)"
    if not has_kernel(shard, *shard.target.heads):
        return "attention of this target's sizes has no kernel"
    return None


def has_kernel(shard: Shard, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Return whether attention of these sizes runs without the host reading sizes back from the device."""
    if shard.device.type != "cuda":
        return True
    from kernels.triton.attention_tiles import supported

    return supported(num_heads, num_kv_heads, head_dim, shard.dtype)


class GraphCache:
    """The graphs of an engine by drafter, each captured once, in one memory.

    To be replaced together with the runner, the head's module or the draft config, which they are captured with.
    """

    def __init__(self, config: EngineConfig, context: int) -> None:
        self._config, self._longest = config, min(context, MAX_CONTEXT)
        self._graphs: dict[str, StepGraphs] = {}
        self._forwards: dict[tuple[Budget, tuple[int, ...]], ForwardGraphs] = {}
        self._memory: GraphMemory | None = None
        self._bytes = 0

    def record(
        self, runner: Runner, default: tuple[Proposer, Budget], max_rows: int, *, adaptive: bool
    ) -> Recorded | None:
        """Capture the steps that need no host, and the parts of others, which proposer and `runner` then replay.

        The former are drafts of the `default` proposer, if it is a head, and plain steps, if nothing is drafted or with
        `adaptive`. `max_rows`: of a verify. Nothing is captured twice. Returns None if there are no graphs. Raises
        ValueError if engine.graphs=on is impossible.
        """
        shard, (proposer, limit) = runner.shard, default
        if not wants_graphs(self._config, shard):
            return None
        memory = self._memory = self._memory or GraphMemory(shard.device)
        drafters = list[tuple[HeadProposer | None, Budget]]()
        if isinstance(proposer, HeadProposer):
            part = proposer.module.config.attention
            if part is None or has_kernel(shard, part.num_heads, part.num_kv_heads, part.head_dim):
                drafters.append((proposer, limit))
            if proposer.shape is not None:
                limit = limit._replace(nodes=min(limit.nodes, proposer.shape.most))
        if adaptive or proposer is PLAIN:
            drafters.append((None, NOTHING))
        sizes = doubling(self._config.max_batch), self._longest, max_rows, memory
        graphs, work = list[StepGraphs](), list[Callable[[], object]]()
        for drafter, most in drafters:
            name = "none" if drafter is None else drafter.name
            if name not in self._graphs:
                self._graphs[name] = StepGraphs(runner, drafter, most, *sizes, early_exit=adaptive)
                work += self._graphs[name].recordings()
            graphs.append(self._graphs[name])
            if drafter is not None:
                drafter.graphs = self._graphs[name]
        key = limit, proposer.needs.aux_layers
        if key not in self._forwards:
            target = Runner(shard, runner.pool)  # without graphs of its own, which would be a cycle
            rare = proposer is PLAIN or any(drafter is proposer for drafter, _ in drafters)
            self._forwards[key] = ForwardGraphs(target, proposer.needs.aux_layers, limit, *sizes, rare=rare)
            work += self._forwards[key].recordings()
        if work:
            self._bytes = memory.record(work, "decode steps")
        forwards = runner.graphs = self._forwards[key]
        count = len(forwards.sizes) + sum(len(one.recordings()) for one in graphs)
        return Recorded(count, self._bytes, tuple(graphs))
