"""Drafts a chain or a tree with a recurrent head: each further token from the state and the token before it.

The head's KV, if it keeps any, lies in layers of the engine's pool. The KV of slot i (token t[i+1], feature f[i]) lies
at place i + 1, so that a page depends only on the tokens up to its end and can be shared by texts that continue
differently. After a verify the head runs over the accepted positions with the target's features, which overwrites the
KV that it wrote from its own states; the last of these rows yields the first drafted tokens, and every further level
costs one forward over the nodes that are grown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.config import ProposerConfig
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.request import Phase, Request
from infer.sampling.batch import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.control.confidence import Confidence
from infer.speculation.proposers.levels import Levels, StepByStep
from infer.speculation.tree import DraftTree
from infer.speculation.tree_shapes import Children, Run, StaticShape, TreeShape, grow, propose_best, tree_shape
from kernels.choose import ChoiceParameters, choose, choose_best, warped_log_probs
from kernels.draft import NativeChains, NativeDraft, NativeTrees, fuse_draft
from kernels.rows import AttentionRows
from models.attention import Attention, no_attention
from models.heads.base import Head

if TYPE_CHECKING:
    from infer.graphs.draft_graphs import DraftGraphs

KEPT_ROWS = 64  # when a request has that many unread feature rows, the head reads them
# Tokens that a head's KV layers must have seen before it drafts for a request that it started tracking within its text:
# the first drafts would hardly ever be right (LOG.md), and would spoil the estimate of the head's acceptance rate.
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


class HeadProposer:
    """Drafts with `head`, packed for serving. The pool holds its layers from `first_layer` on; `shape` None: chains."""

    name = "head"

    def __init__(self, head: Head, first_layer: int, config: ProposerConfig) -> None:
        self.aux_layers = head.config.aux_layers
        attn = head.attention
        self.kv_layers = () if attn is None else (LayerShape(attn.num_kv_heads, attn.head_dim),) * attn.layers
        self.warm_up = MIN_SEEN if self.kv_layers else 0
        self._head, self._first_layer = head, first_layer
        self.draft_ids = head.target_ids
        self.shape: TreeShape | None = None
        with torch.no_grad():
            self.mask_slot = head.mask_slot()
        self.set_drafts(config)
        self._pool: KVPool | None = None
        self._caches: Sequence[Tensor] = ()
        self._native: NativeDraft | None = None  # runs a whole level in one call
        self._pending: dict[str, Pending] = {}  # features of committed positions that the head has not read
        # Requests whose pending features were read in this step; kept until the commit, should the draft be retried.
        self._read: set[str] = set()
        self._base: dict[str, int] = {}  # first slot that it was given, for requests that it did not see from the start
        self.graphs: DraftGraphs | None = None
        self.confidence: Confidence | None = None  # if set, decides on the early exit of chains

    @property
    def exits_early(self) -> bool:
        """Whether it drafts chains whose tokens become available one by one, as an early exit needs."""
        return self.shape is None and self.graphs is None

    @property
    def module(self) -> Head:
        return self._head

    @property
    def feature_size(self) -> int:
        """Size of the features of one position, over all aux layers."""
        return len(self.aux_layers) * self._head.config.target_hidden_size

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees, and how deep. Raises ValueError for what this head cannot draft."""
        shape, max_depth = tree_shape(config), self._head.config.max_depth
        depth = config.max_draft_tokens if shape is None else shape.depth
        if max_depth is not None and depth > max_depth:
            key = "proposer.tree" if shape is not None else f"proposer.max_draft_tokens={depth}"
            raise ValueError(f"{key}: this {self._head.name} head drafts {max_depth} tokens at most, not {depth}")
        if isinstance(shape, StaticShape) and shape.widest > len(self.draft_ids):
            raise ValueError(
                f"proposer.tree: rank {shape.widest - 1}: the head drafts from {len(self.draft_ids)} tokens"
            )
        self.shape = shape

    def attach(self, pool: KVPool) -> None:
        self._pool = pool
        self._caches = pool.layers.caches[self._first_layer : self._first_layer + len(self.kv_layers)]
        parts = None if self._head.parallel else self._head.draft_parts()
        if parts is not None and any(cache.dtype is not parts.decoder.dtype for cache in self._caches):
            parts = None
        self._native = None if parts is None else fuse_draft(parts)

    def places(self, budget: Budget) -> int:
        return budget.nodes if self.shape is None else max(budget.nodes, self.shape.rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for request, rows in zip(requests, features.split(list(counts)), strict=True):
            if (num_new := request.computed - self._base.get(request.request_id, 0)) < len(rows):
                rows = rows[len(rows) - max(num_new, 0) :]
            if not len(rows):
                continue
            if not self.kv_layers:  # without KV only the last position matters
                self._pending[request.request_id] = Pending(rows[-1:].clone())
            elif (pending := self._unread(request)) is None:
                self._pending[request.request_id] = Pending(rows)
            else:
                pending.add(rows)
            self._read.discard(request.request_id)
        if not self.kv_layers:
            return
        # Few features are kept: prompts are read chunk by chunk, and texts without drafts every KEPT_ROWS positions.
        due = [r for r in requests if r.phase is Phase.PREFILL or self._count(r) >= KEPT_ROWS]
        if due:
            self._fill(due)
            for request in due:
                last = self._pending[request.request_id].pieces[-1][-1:].clone()
                self._forget_features(request)
                if request.phase is Phase.DECODE:  # the next draft starts from it; reading it again changes nothing
                    self._pending[request.request_id] = Pending(last)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        active = [index for index, budget in enumerate(budgets) if budget.nodes > 0]
        idle = [index for index, budget in enumerate(budgets) if budget.nodes == 0]
        roots = DraftTree.chains([requests[i].tokens[-1] for i in idle], [()] * len(idle)) if idle else None
        if not active:
            assert roots is not None
            return roots
        # Block verification takes chains only.
        chains = [i for i in active if self.shape is None or requests[i].params.acceptance == "block"]
        trees = [i for i in active if i not in chains]
        drafted = [
            (draft([requests[i] for i in indices], [budgets[i] for i in indices]), indices)
            for draft, indices in ((self._chains, chains), (self._trees, trees))
            if indices
        ]
        if roots is not None:
            drafted.append((roots, idle))
        if len(drafted) == 1:
            return drafted[0][0]
        return DraftTree.stack([tree for tree, _ in drafted], [indices for _, indices in drafted])

    def synced(self, request: Request) -> int:
        # The slots before the first pending one are filled. Slot i lies at place i + 1: one place more than slots.
        return min(request.computed, request.computed - self._count(request) + 1)

    def resume(self, request: Request) -> None:
        if request.last_features is not None:
            self._pending[request.request_id] = Pending(request.last_features[None])

    def release(self, request: Request) -> None:
        self._forget_features(request)
        self._base.pop(request.request_id, None)

    def catch_up(self, request: Request) -> None:
        if self.kv_layers and self._count(request):
            self._fill([request])

    def start_tracking(self, request: Request) -> None:
        """Begin the head's KV at the next page boundary; no row attends to what lies before it."""
        if self.kv_layers:
            assert self._pool is not None
            self._base[request.request_id] = self._pool.pages_for(request.computed) * self._pool.page_size

    def ready(self, request: Request) -> bool:
        base = self._base.get(request.request_id, 0)
        return request.request_id in self._pending and (not base or request.computed - base >= self.warm_up)

    def features(self, requests: Sequence[Request]) -> list[Tensor]:
        """Return the pending features of each request, `[n, F]`."""
        return [self._pending[request.request_id].rows() for request in requests]

    def bases(self, requests: Sequence[Request]) -> list[int]:
        """Return the first slot of each request that the head was given."""
        return [self._base.get(request.request_id, 0) for request in requests]

    def was_read(self, requests: Sequence[Request]) -> None:
        """Mark the pending features of these requests as read; until the next commit they are not read again."""
        self._read.update(request.request_id for request in requests)

    def _forget_features(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)
        self._read.discard(request.request_id)

    def _unread(self, request: Request) -> Pending | None:
        return None if request.request_id in self._read else self._pending.get(request.request_id)

    def _count(self, request: Request) -> int:
        """Return the number of committed positions that the head has not read."""
        pending = self._unread(request)
        return 0 if pending is None else pending.count

    # ---- drafting -----------------------------------------------------------------------------------------------

    def _chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        if self.graphs is not None:
            depths = [budget.depth for budget in budgets]
            replayed = self.graphs.chains(requests, self.features(requests), self.bases(requests), depths)
            if replayed is not None:
                self.was_read(requests)
                return DraftTree.chains([request.tokens[-1] for request in requests], replayed)
        return self._draft_chains(requests, budgets)

    def _draft_chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        levels = self._levels(requests, max(budget.depth for budget in budgets))
        drafts: list[list[int]] = [[] for _ in requests]
        active, depth = list(range(len(requests))), 0
        confidence = self.confidence if self.confidence is not None and self.confidence.scoring else None
        if confidence is not None:
            confidence.start(requests, [budget.depth for budget in budgets])
        while True:
            tokens, values = levels.draft(return_log_probs=confidence is not None)
            verdicts = None
            if confidence is not None:
                assert values is not None
                verdicts = confidence.score([requests[index] for index in active], values)
            depth += 1
            continuing = []
            for place, (index, token) in enumerate(zip(active, tokens, strict=True)):
                if verdicts is None or verdicts[place].keep:
                    drafts[index].append(token)
                if budgets[index].depth > depth and (verdicts is None or verdicts[place].continue_):
                    continuing.append(place)
            if not continuing:
                break
            if len(continuing) < len(active):
                active = [active[place] for place in continuing]
                levels.keep(continuing)
        tree = DraftTree.chains([request.tokens[-1] for request in requests], drafts)
        if isinstance(levels, StepByStep):
            tree.draft_probs = {index: torch.stack(probs) for index, probs in levels.draft_probs.items()}
        return tree

    def _levels(self, requests: list[Request], deepest: int) -> Levels:
        parameters = choice_parameters(requests, self.draft_ids.device, drafting=True)
        stepwise = any(request.constraint is not None or request.params.acceptance == "block" for request in requests)
        if self._native is None or stepwise or (parameters is not None and parameters.restricts):
            return StepByStep(self, requests, self._read_pending(requests), parameters)
        return self._native_chains(self._native, requests, parameters, deepest)

    def _native_chains(
        self, native: NativeDraft, requests: Sequence[Request], parameters: ChoiceParameters | None, deepest: int
    ) -> NativeChains:
        return NativeChains(native, *self._first_inputs(native, requests, deepest), self._caches, parameters, deepest)

    def _native_trees(
        self, native: NativeDraft, requests: Sequence[Request], parameters: ChoiceParameters | None, deepest: int
    ) -> NativeTrees:
        shape = self.shape
        assert shape is not None
        fan_out = max(shape.fan_out(level) for level in range(1, deepest + 1))
        limits = {"width": shape.width, "count": fan_out, "places": shape.rows}
        inputs = self._first_inputs(native, requests, deepest)
        return NativeTrees(native, *inputs, self._caches, parameters, deepest, **limits)

    def _first_inputs(
        self, native: NativeDraft, requests: Sequence[Request], deepest: int
    ) -> tuple[Tensor, Tensor, Tensor, AttentionRows]:
        """Return the first level's inputs, all pending positions of each request, and mark them as read."""
        tokens, state, slots, rows = self._unread_rows(requests)
        assert rows is not None
        assert max(len(request.tokens) for request in requests) + deepest <= len(native.parts.rotary[0])
        self.was_read(requests)
        return tokens, state, slots, rows

    def _trees(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Grow every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own budget."""
        assert self.shape is not None
        roots, grown = [request.tokens[-1] for request in requests], None
        if self.graphs is not None:
            grown = self.graphs.trees(requests, self.features(requests), self.bases(requests))
        if grown is not None:
            self.was_read(requests)
        else:
            deepest = max(budget.depth for budget in budgets)
            ids = torch.tensor(roots, device=self.draft_ids.device)
            grown = grow(self.shape, deepest, ids, *self._growing(requests, budgets))
        return propose_best(roots, *grown, budgets)

    def _growing(self, requests: list[Request], budgets: list[Budget]) -> tuple[Children, Run]:
        device = self.draft_ids.device
        parameters = choice_parameters(requests, device, drafting=True)
        if self._native is not None and not (parameters is not None and parameters.restricts):
            deepest = max(budget.depth for budget in budgets)
            trees = self._native_trees(self._native, requests, parameters, deepest)
            return trees.children, trees.run
        slots = [len(request.tokens) - 1 for request in requests]  # positions of the roots
        state = self._read_pending(requests)

        def address(offsets: Tensor, tree_mask: Tensor) -> AttentionRows:
            assert self._pool is not None
            places, bases = [slot + 1 for slot in slots], self.bases(requests)
            return self._pool.level(requests, places, offsets, tree_mask, first=1, bases=bases)

        return self.growing(state, torch.tensor(slots, device=device), parameters, address)

    def growing(
        self,
        state: Tensor,
        slots: Tensor,
        parameters: ChoiceParameters | None,
        address: Callable[[Tensor, Tensor], AttentionRows],
    ) -> tuple[Children, Run]:
        """Return the callbacks by which `grow` runs this head; each node attends to its own ancestors.

        state `[B, S]` of each root, `slots` `[B]` the roots' positions. `address(offsets, tree_mask)` addresses N rows
        of each request, at offsets `[N]` from the place after the root's, with the tree mask `[B, N]`.
        """
        device, batch, start = slots.device, len(slots), slots[:, None]
        state = state[:, None]  # [B, M, S] of the nodes that a level is grown from
        tree_mask = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, M]
        run_before = 0

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            width = state.shape[1]
            owner = torch.arange(batch, device=device).repeat_interleave(width)
            positions = (start + level - 1).expand(-1, width).flatten()  # slot i drafts the choice at position i + 1
            logits = self._head.logits(state.flatten(0, 1), level - 1)
            tokens, values = self.best(logits, positions, parameters and parameters.rows(owner), fan_out)
            return tokens.unflatten(0, (batch, width)), values.unflatten(0, (batch, width))

        def run(level: int, parent: Tensor, token: Tensor) -> None:
            nonlocal state, tree_mask, run_before
            above = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1])).flatten(0, 1)
            positions = (start + level - 1).expand_as(parent).flatten()
            attention: Attention = no_attention
            if self.kv_layers:
                offsets = run_before + torch.arange(parent.shape[1], device=device)
                tree_mask = tree_mask.gather(1, parent) | (torch.ones((), dtype=torch.int64, device=device) << offsets)
                run_before += parent.shape[1]
                attention = self.attend(address(offsets, tree_mask))
            state = self._head.step(token.flatten(), above, positions, attention, level).unflatten(0, parent.shape)

        return children, run

    # ---- shared by chains and trees -----------------------------------------------------------------------------

    def choice(self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None) -> Tensor:
        """Return the head's choice `[R]` (target ids), under the noise of the target's choice at the same position."""
        return self.draft_ids[choose(logits, parameters, positions, self.draft_ids)]

    def best(
        self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's `count` best target ids under the same noise, `[R, count]`, and their log-probabilities."""
        count = min(count, logits.shape[1])
        columns, values = choose_best(logits, parameters, positions, self.draft_ids, count)
        return self.draft_ids[columns], values

    def draft_probs(
        self, requests: Sequence[Request], logits: Tensor, parameters: ChoiceParameters | None
    ) -> dict[int, Tensor]:
        """Return, for block verification, the distribution `[V]` over target ids that a row's token is drawn from."""
        wanted = [
            row
            for row, request in enumerate(requests)
            if request.params.acceptance == "block" and request.params.temperature > 0
        ]
        if not wanted:
            return {}
        rows = torch.tensor(wanted, device=logits.device)
        probs = warped_log_probs(logits[rows], parameters and parameters.rows(rows)).softmax(-1)
        full_probs = probs.new_zeros(len(wanted), self._head.config.vocab_size)
        full_probs[:, self.draft_ids] = probs
        return dict(zip(wanted, full_probs, strict=True))

    def rows(self, requests: Sequence[Request], slots: Sequence[int], counts: Sequence[int]) -> AttentionRows:
        """Address `counts[b]` slots of each request from `slots[b]` on."""
        assert self._pool is not None
        places = [slot + 1 for slot in slots]
        return self._pool.rows(requests, places, counts, first=1, bases=self.bases(requests))

    def _slots(self, requests: Sequence[Request], rows: AttentionRows) -> Tensor:
        """Return the rotary positions `[R]` of these rows."""
        places = rows.places - 1
        bases = self.bases(requests)
        return places + torch.tensor(bases, device=places.device)[rows.request] if any(bases) else places

    def attend(self, rows: AttentionRows) -> Attention:
        attention = self._head.attention
        assert self._pool is not None
        assert attention is not None
        sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        return self._pool.layers.attention(rows, *sizes, first_layer=self._first_layer)

    def _fill(self, requests: Sequence[Request]) -> None:
        """Write the head's KV of all pending positions of each request; the resulting states are not used."""
        if self._native is None:
            self._read_pending(requests)
        else:
            self._native_chains(self._native, requests, None, 0).read()

    def _read_pending(self, requests: Sequence[Request], masks: Sequence[int] | None = None) -> Tensor:
        """Run the head over all pending positions of each request; return the state of each one's last slot `[B, S]`.

        With `masks`, `masks[b]` rows of a parallel head's mask slot follow, and the states of all rows `[R, S]` are
        returned. In a step that is retried, the second call writes the same KV again.
        """
        tokens, state, slots, rows = self._unread_rows(requests, masks)
        attention = no_attention if rows is None else self.attend(rows)
        state = self._head.step(tokens, state, slots, attention, 0)
        self.was_read(requests)
        if masks is not None or rows is None:
            return state
        return state[torch.tensor(rows.counts, device=state.device).cumsum(0) - 1]

    def _unread_rows(
        self, requests: Sequence[Request], masks: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionRows | None]:
        """Return what `_read_pending` reads: tokens `[R]`, fused states `[R, S]`, slots `[R]`, and the rows' addresses.

        For a head without KV there are no addresses, and one row of each request.
        """
        features = self.features(requests)
        counts = [len(rows) for rows in features]
        starts = [request.computed - count for request, count in zip(requests, counts, strict=True)]
        shifted = [
            request.tokens[start + 1 : start + count + 1]
            for request, start, count in zip(requests, starts, counts, strict=True)
        ]
        device = self.draft_ids.device
        state = self._head.fuse(torch.cat(features).chunk(len(self.aux_layers), dim=-1))
        if masks is not None:
            assert self.mask_slot is not None
            mask_id, mask_state = self.mask_slot
            shifted = [tokens + [mask_id] * count for tokens, count in zip(shifted, masks, strict=True)]
            pieces = zip(state.split(counts), masks, strict=True)
            state = torch.cat([part for piece, count in pieces for part in (piece, mask_state.expand(count, -1))])
            counts = [len(tokens) for tokens in shifted]
        tokens = torch.tensor([token for piece in shifted for token in piece], device=device)
        if not self.kv_layers:
            return tokens, state, torch.tensor(starts, device=device), None
        rows = self.rows(requests, starts, counts)
        return tokens, state, self._slots(requests, rows), rows
