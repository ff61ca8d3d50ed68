"""Drafts a chain or a tree with a head, by the loop of its kind (proposers/draft_loops/).

The head's KV, if it keeps any, lies in layers of the engine's pool. The KV of slot i (token t[i+1], feature f[i]) lies
at place i + 1, so that a page depends only on the tokens up to its end and can be shared by texts that continue
differently. After a verify the head runs over the accepted positions with the target's features, which overwrites the
KV that it wrote from its own states; the last of these rows yields the first drafted tokens, and every further level
costs one forward over the nodes that are grown.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.config import ProposerConfig
from infer.kvcache.pool import KVPool
from infer.request import PLAIN, DrafterState, Needs, Phase, Proposer, ProposerState, Request
from infer.sampling.choose import choice_parameters
from infer.sampling.emission import narrowed
from infer.speculation.control.confidence import Confidence
from infer.speculation.proposers.draft_loops import draft_loop
from infer.speculation.proposers.draft_loops.base import DraftLoop, Unread
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit, exit_rows
from infer.speculation.proposers.draft_loops.tree_shapes import StaticShape, TreeShape, propose_best, tree_shape
from kernels.attention import LayerShape
from kernels.choose import warped_log_probs
from kernels.copies import upload, upload_lists
from kernels.operands import ChoiceParameters
from kernels.slower import say_slower, slower_layers
from models.config import TargetConfig
from models.heads.base import Head
from models.layers import Linear, copy_packed

KEPT_ROWS = 64  # when a request has that many unread feature rows, the head reads them
# Tokens that a head's KV layers must have seen before it drafts for a request that it started tracking within its text:
# the first four were right in 17 of 100 cases, the 12th to 15th in 75, and spoil the estimate of its acceptance rate.
MIN_SEEN = 24


class Pending:
    """Features `[n, A * H]` of consecutive positions, stored as one piece per step.

    Their number is read in every step, the rows themselves rarely.
    """

    def __init__(self, rows: Tensor) -> None:
        self.pieces, self.count = [rows], len(rows)

    def add(self, rows: Tensor) -> None:
        self.pieces.append(rows)
        self.count += len(rows)

    def rows(self) -> Tensor:
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)


@dataclass
class HeadState(ProposerState):
    """What a head keeps of one request: features of committed positions, none if it did not follow it yet."""

    pending: Pending | None = None
    read: bool = False  # in this step; they are kept until the commit, should the draft be retried
    base: int = 0  # first slot that it was given, if it did not see the request from the start
    warm_up: int = 0  # tokens from there on that it must have seen

    @property
    def unread(self) -> int:
        """The number of committed positions that the head has not read."""
        return 0 if self.read or self.pending is None else self.pending.count

    @property
    def rows(self) -> Tensor:
        """The pending features `[n, F]`."""
        assert self.pending is not None
        return self.pending.rows()

    def ready(self, request: Request) -> bool:
        return self.pending is not None and (not self.base or request.computed - self.base >= self.warm_up)

    def synced(self, request: Request) -> int:
        # The slots before the first pending one are filled. Slot i lies at place i + 1: one place more than slots.
        return min(request.computed, request.computed - self.unread + 1)


class ModelProposer(Proposer):
    """Drafts with `head`, packed for serving. `shape` None: chains."""

    module: Head
    loop: DraftLoop
    hybrid: TargetConfig | None = None  # the model, if it has recurrent layers, for which the engine plans states
    _first_place = 0  # that the model's KV may lie at
    shape: TreeShape | None

    def __init__(self, head: Head, config: ProposerConfig, weights_key: str) -> None:
        linears = [module.packed for module in head.modules() if isinstance(module, Linear)]
        say_slower(slower_layers((packed for packed in linears if packed is not None), weights_key))
        shape = head.config.attention
        if shape is not None:
            layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.value_dim)
            self.needs = Needs(kv_layers=(layer,) * shape.layers)
        self.module, self.loop = head, draft_loop(head)
        self._pool: KVPool | None = None
        self.first_layer = 0  # its KV layers in the pool begin there
        self.set_drafts(config)

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees. Raises ValueError for a tree wider than what it can draft."""
        shape, choices = tree_shape(config), self._choices(config)
        if isinstance(shape, StaticShape) and shape.widest > choices:
            drafter = self.name.replace("_", " ")
            raise ValueError(f"proposer.tree: rank {shape.widest - 1}: the {drafter} drafts from {choices} tokens")
        self.shape = shape

    def places(self, budget: Budget) -> int:
        return max(budget.nodes, self.loop.places(budget.depth, self.shape))

    def propose(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        """Requests with a depth of 0 get no drafts, those under block verification, which takes no trees, chains."""
        deep = self._chains if self.shape is None else self._trees
        drafts = [self._chains if request.params.acceptance == "block" else deep for request in requests]
        drafts = [draft if budget.depth > 0 else PLAIN.propose for draft, budget in zip(drafts, budgets, strict=True)]

        def draft(kind: Callable[..., DraftTree], rows: list[int]) -> DraftTree:
            return kind([requests[b] for b in rows], [states[b] for b in rows], [budgets[b] for b in rows])

        return DraftTree.by_group(drafts, draft)

    def _choices(self, config: ProposerConfig) -> int:
        """Return from how many tokens a depth is drafted."""
        return self.loop.choices(config.candidates)

    def attach(self, pool: KVPool, first_layer: int, state_slots: int = 0) -> None:
        """Keep the model's KV in the layers of `pool` from `first_layer` on, and of a hybrid so many states."""
        self._pool, self.first_layer = pool, first_layer
        self.loop.attach(pool.layers, first_layer)

    @abstractmethod
    def _chains(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        """Draft chains of these depths, at least one token each."""

    def _trees(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        """Grow every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own budget."""
        assert self.shape is not None
        deepest = max(budget.depth for budget in budgets)
        grown = self.loop.tree(self._unread_rows(requests, states, deepest), self.shape, deepest)
        self.was_read(requests, states)
        return propose_best([request.tokens[-1] for request in requests], grown, budgets)

    def _fill(self, requests: Sequence[Request], states: Sequence[Any]) -> None:
        """Write the KV of the committed positions of each request that the model has not read."""
        self.loop.read(self._unread_rows(requests, states))
        self.was_read(requests, states, drafting=False)

    def _unread_rows(self, requests: Sequence[Request], states: Sequence[Any], depth: int = 0) -> Unread:
        """Return what the model has not read of each request, and the spare rows of a draft of this depth, if any.

        In a step that is retried, the second call returns the same rows, so that the same KV is written again.
        """
        drafting, spare, device = depth > 0, self.loop.spare_rows(depth) if depth else 0, self.loop.draft_ids.device
        starts, counts, features = self._unread_slots(requests, states, drafting=drafting)
        bases, widths = [state.base for state in states], [count + spare for count in counts]
        ids = [
            token
            for request, start, count in zip(requests, starts, counts, strict=True)
            for token in (*request.tokens[start + 1 : start + 1 + count], *[0] * spare)
        ]
        slots = [start + row for start, width in zip(starts, widths, strict=True) for row in range(width)]
        last_rows = [end - 1 - spare for end in itertools.accumulate(widths)]
        roots, rows = [len(request.tokens) - 1 for request in requests], None
        if self.needs.kv_layers:
            assert self._pool is not None
            places = [start + 1 for start in starts]
            rows = self._pool.rows(requests, places, widths, first=self._first_place, bases=bases)
        row_ids, row_slots, ends, root, base = upload_lists([ids, slots, last_rows, roots, bases], device)
        return Unread(
            ids=row_ids,
            features=torch.cat([F.pad(part, (0, 0, 0, spare)) for part in features] if spare else features),
            slots=row_slots,
            rows=rows,
            ends=ends,
            root=root,
            base=base,
            requests=root if rows is None else rows.request[ends],
            parameters=choice_parameters(requests, device, drafting=True) if drafting else None,
        )

    @abstractmethod
    def _unread_slots(
        self, requests: Sequence[Request], states: Sequence[Any], *, drafting: bool
    ) -> tuple[list[int], list[int], list[Tensor]]:
        """Return the first slot of each request that the model has not read, their number, and their features.

        Features are `[n, F]` each. Slot i holds token t[i+1], at place i + 1. For a draft the last slot is the root's,
        otherwise that of the last committed position.
        """

    @abstractmethod
    def was_read(self, requests: Sequence[Request], states: Sequence[Any], *, drafting: bool = True) -> None:
        """Take note that the rows which `_unread_rows` returned were read."""


class Adjustment:
    """What grammars and block verification do to the logits of a head's chains, level by level.

    `draft_probs`: by row, for block verification, the distributions `[V]` over target ids of its levels.
    """

    def __init__(
        self, requests: Sequence[Request], ids: Tensor, vocab_size: int, parameters: ChoiceParameters | None
    ) -> None:
        self._requests, self._ids, self._size, self._parameters = requests, ids, vocab_size, parameters
        self._constrained = any(request.constraint is not None for request in requests)
        self.draft_probs: dict[int, list[Tensor]] = {}
        pairs = ((row, request.params) for row, request in enumerate(requests))
        self._wanted = [row for row, params in pairs if params.acceptance == "block" and params.temperature > 0]

    def __call__(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Mask draft logits `[B, Vd]` after the tokens `[B]` of each level before."""
        paths = [[]] * len(self._requests)
        if drafted and self._constrained:
            paths = torch.stack(list(drafted), dim=1).tolist()
        logits = narrowed(self._requests, logits, paths, self._ids)
        if self._wanted:
            rows = upload(self._wanted, logits.device)
            probs = warped_log_probs(logits[rows], self._parameters and self._parameters.rows(rows)).softmax(-1)
            full_probs = probs.new_zeros(len(rows), self._size)
            full_probs[:, self._ids] = probs
            for row, values in zip(self._wanted, full_probs, strict=True):
                self.draft_probs.setdefault(row, []).append(values)
        return logits


class CapturedDrafts(Protocol):
    """Graphs in which the head drafts for steps that the host runs (infer/graphs/step_graph.py)."""

    width: int  # most unread positions of a request that they can read

    def draft(
        self, requests: Sequence[Request], states: Sequence[HeadState], budgets: Sequence[Budget]
    ) -> tuple[DraftTree, list[list[float]]] | None:
        """Return the drafts, and of chains that may exit early the log-probabilities; None if they fit no graph."""
        ...


class HeadProposer(ModelProposer):
    """Drafts with `head`, packed for serving."""

    name = "head"
    _first_place = 1

    def __init__(self, head: Head, config: ProposerConfig) -> None:
        super().__init__(head, config, "engine.head_weights")
        warm_up = MIN_SEEN if self.needs.kv_layers else 0
        self.needs = self.needs._replace(aux_layers=head.config.aux_layers, warm_up=warm_up)
        self.draft_ids = self.loop.draft_ids
        self.confidence: Confidence | None = None  # if set, decides on the early exit of chains
        # in which it drafts where they are captured and no draft needs the host
        self.graphs: CapturedDrafts | None = None

    @property
    def feature_size(self) -> int:
        """Size of the features of one position, over all aux layers."""
        return len(self.needs.aux_layers) * self.module.config.target_hidden_size

    @property
    def max_depth(self) -> int | None:
        """Most tokens of a chain that the head can draft; None for any number."""
        return self.module.config.max_depth

    def fits(self, head: Head) -> bool:
        """Return whether `continuing` can copy the weights of this head."""
        same = type(head) is type(self.module) and head.config == self.module.config
        return same and torch.equal(head.target_ids.to(self.draft_ids.device), self.draft_ids)

    @torch.no_grad()
    def continuing(self, before: HeadProposer, pool: KVPool) -> HeadProposer:
        """Return the proposer that drafts in `pool` from now on in place of `before`, whose KV layers are the same.

        It is `before` with the weights of this one, if they fit: what has captured them goes on.
        """
        if not before.fits(self.module):
            self.attach(pool, before.first_layer)
            return self
        copy_packed(self.module, before.module)
        before.loop.refresh()
        return before

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees, and how deep. Raises ValueError for what this head cannot draft."""
        shape, max_depth = tree_shape(config), self.max_depth
        depth = config.draft_tokens if shape is None else shape.depth
        if max_depth is not None and depth > max_depth and config.head_alone:
            key = "proposer.tree" if shape is not None else f"proposer.max_draft_tokens={depth}"
            name = self.module.config.name
            raise ValueError(f"{key}: this {name} head drafts {max_depth} tokens at most, not {depth}")
        super().set_drafts(config)

    def begin(self, request: Request) -> HeadState:
        """From a start within the text, the head's KV begins at a page boundary; no row attends to what lies before."""
        state = HeadState(warm_up=self.needs.warm_up)
        if not request.computed:
            return state
        if request.drafter.state is DrafterState.FULL and request.last_features is not None:
            state.pending = Pending(request.last_features[None])
        elif request.drafter.state is DrafterState.PARTIAL and self.needs.kv_layers:
            assert self._pool is not None
            state.base = self._pool.pages_for(request.computed) * self._pool.page_size
        return state

    def commit(self, requests: Sequence[Request], states: Sequence[HeadState], features: Sequence[Tensor]) -> None:
        # Few features are kept: prompts are read chunk by chunk, and texts without drafts every KEPT_ROWS positions.
        # Of a prompt's last chunk a graph could not read more than of a verify.
        verified, due = KEPT_ROWS if self.graphs is None else self.graphs.width, list[int]()
        for b, (request, state, rows) in enumerate(zip(requests, states, features, strict=True)):
            prompt = request.phase is Phase.PREFILL or len(rows) > verified
            if (num_new := request.computed - state.base) < len(rows):
                rows = rows[len(rows) - max(num_new, 0) :]
            if len(rows) and not self.needs.kv_layers:  # without KV only the last position matters
                rows = rows[-1:].clone()
            if len(rows):
                if not self.needs.kv_layers or state.read or state.pending is None:
                    state.pending = Pending(rows)
                else:
                    state.pending.add(rows)
                state.read = False
            if self.needs.kv_layers and state.unread >= (1 if prompt else KEPT_ROWS):
                due.append(b)
        if due:
            self._read_now([requests[b] for b in due], [states[b] for b in due])

    def _read_now(self, requests: Sequence[Request], states: Sequence[HeadState]) -> None:
        """Read the pending features of these requests, and keep only what the next draft starts from."""
        self._fill(requests, states)
        for request, state in zip(requests, states, strict=True):
            assert state.pending is not None
            last = state.pending.pieces[-1][-1:].clone()
            state.pending = Pending(last) if request.phase is Phase.DECODE else None  # reading it again changes nothing
            state.read = False

    def propose(self, requests: Sequence[Request], states: Sequence[HeadState], budgets: Sequence[Budget]) -> DraftTree:
        replayed = None if self.graphs is None else self._replay(self.graphs, requests, states, budgets)
        return super().propose(requests, states, budgets) if replayed is None else replayed

    def catch_up(self, request: Request, state: HeadState) -> None:
        if self.needs.kv_layers and state.unread:
            self._fill([request], [state])

    def was_read(self, requests: Sequence[Request], states: Sequence[HeadState], *, drafting: bool = True) -> None:
        """Mark the pending features of these requests as read; until the next commit they are not read again."""
        for state in states:
            state.read = True

    # ---- drafting -----------------------------------------------------------------------------------------------

    def _replay(
        self,
        graphs: CapturedDrafts,
        requests: Sequence[Request],
        states: Sequence[HeadState],
        budgets: Sequence[Budget],
    ) -> DraftTree | None:
        """Draft in a CUDA graph; None, with nothing done, if none fits or a draft needs the host."""
        drafted = None if any(map(self._needs_host, requests)) else graphs.draft(requests, states, budgets)
        if drafted is None:
            return None
        self.was_read(requests, states)
        tree, scores = drafted
        if self.confidence is not None and self.confidence.scoring and any(scores):
            self._record_scores(self.confidence, requests, [budget.depth for budget in budgets], scores)
        return tree

    def _needs_host(self, request: Request) -> bool:
        """Return whether the host reads or changes the logits that it drafts from."""
        return request.params.acceptance == "block" or (self.shape is None and request.constraint is not None)

    def _chains(self, requests: Sequence[Request], states: Sequence[HeadState], budgets: Sequence[Budget]) -> DraftTree:
        depths = [budget.depth for budget in budgets]
        deepest, limits = max(depths), upload(depths, self.draft_ids.device)
        unread, adjust, early_exit = self._unread_rows(requests, states, deepest), None, None
        if any(request.constraint is not None or request.params.acceptance == "block" for request in requests):
            adjust = Adjustment(requests, self.draft_ids, self.module.config.vocab_size, unread.parameters)
        if self.confidence is not None and self.confidence.scoring:
            terms = exit_rows(self.confidence, requests, depths, deepest, parallel=self.loop.one_forward)
            early_exit = EarlyExit(terms, depths)
        chains = self.loop.chain(unread, limits, deepest, early_exit, adjust)
        self.was_read(requests, states)
        roots, lengths = torch.tensor([request.tokens[-1] for request in requests]), chains.length.cpu()
        if self.confidence is not None and chains.log_probs is not None:
            pairs = zip(lengths.tolist(), chains.log_probs.tolist(), strict=True)
            self._record_scores(self.confidence, requests, depths, [scores[:length] for length, scores in pairs])
        tree = DraftTree.chain(roots, chains.token.cpu(), lengths)
        if adjust is not None:
            tree.draft_probs = {row: torch.stack(probs[: depths[row]]) for row, probs in adjust.draft_probs.items()}
        return tree

    def _record_scores(
        self, confidence: Confidence, requests: Sequence[Request], depths: list[int], log_probs: list[list[float]]
    ) -> None:
        for request, depth, scores in zip(requests, depths, log_probs, strict=True):
            confidence.record(request, depth, scores)

    def _unread_slots(
        self, requests: Sequence[Request], states: Sequence[HeadState], *, drafting: bool
    ) -> tuple[list[int], list[int], list[Tensor]]:
        features = [state.rows for state in states]
        counts = [len(rows) for rows in features]
        return [r.computed - count for r, count in zip(requests, counts, strict=True)], counts, features
