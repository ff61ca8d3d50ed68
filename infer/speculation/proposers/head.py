"""Drafts a chain or a tree with a head, recurrent or parallel (infer/speculation/draft_loop.py).

The head's KV, if it keeps any, lies in layers of the engine's pool. The KV of slot i (token t[i+1], feature f[i]) lies
at place i + 1, so that a page depends only on the tokens up to its end and can be shared by texts that continue
differently. After a verify the head runs over the accepted positions with the target's features, which overwrites the
KV that it wrote from its own states; the last of these rows yields the first drafted tokens, and every further level
costs one forward over the nodes that are grown.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import ProposerConfig
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.request import Phase, Request
from infer.sampling.choose import choice_parameters
from infer.sampling.emission import narrowed
from infer.speculation.budget import Budget
from infer.speculation.control.confidence import Confidence
from infer.speculation.draft_loop import NativeLoop, TorchLoop, Unread
from infer.speculation.early_exit import EarlyExit, HostExit, exit_rows
from infer.speculation.proposers.base import Needs, Proposer, Tracker
from infer.speculation.proposers.block_loop import BlockLoop
from infer.speculation.proposers.parallel_loop import ParallelLoop
from infer.speculation.tree import DraftTree
from infer.speculation.tree_shapes import StaticShape, TreeShape, propose_best, tree_shape
from kernels.choose import ChoiceParameters, warped_log_probs
from kernels.draft import fuse_draft
from kernels.slower import say_slower, slower_layers
from kernels.upload import upload, upload_columns
from models.heads.base import Head
from models.heads.block import BlockHead
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


class CapturedDrafts(Protocol):
    """Graphs in which the head drafts for steps that the host runs (infer/graphs/step_graph.py)."""

    width: int  # most unread positions of a request that they can read

    def draft(
        self, requests: Sequence[Request], budgets: Sequence[Budget]
    ) -> tuple[DraftTree, list[list[float]]] | None:
        """Return the drafts, and of chains that may exit early the log-probabilities; None if they fit no graph."""
        ...


class HeadProposer(Proposer, Tracker):
    """Drafts with `head`, packed for serving. The pool holds its layers from `first_layer` on; `shape` None: chains."""

    name = "head"
    loop: TorchLoop  # once attached

    def __init__(self, head: Head, first_layer: int, config: ProposerConfig) -> None:
        attn = head.attention
        layers = [module.packed for module in head.modules() if isinstance(module, Linear)]
        say_slower(slower_layers((packed for packed in layers if packed is not None), "engine.head_weights"))
        kv_layers = () if attn is None else (LayerShape(attn.num_kv_heads, attn.head_dim),) * attn.layers
        self.needs = Needs(head.config.aux_layers, kv_layers, warm_up=MIN_SEEN if kv_layers else 0)
        self._head, self._first_layer = head, first_layer
        self.draft_ids = head.target_ids
        self.shape: TreeShape | None = None
        self.set_drafts(config)
        self._pool: KVPool | None = None
        self._native: NativeLoop | None = None  # for drafts that need neither to read nor to restrict logits
        self._pending: dict[str, Pending] = {}  # features of committed positions that the head has not read
        # Requests whose pending features were read in this step; kept until the commit, should the draft be retried.
        self._read: set[str] = set()
        self._base: dict[str, int] = {}  # first slot that it was given, for requests that it did not see from the start
        self.confidence: Confidence | None = None  # if set, decides on the early exit of chains
        self.graphs: CapturedDrafts | None = (
            None  # in which it drafts where they are captured and no draft needs the host
        )

    @property
    def tracker(self) -> Tracker:
        return self

    @property
    def module(self) -> Head:
        return self._head

    @property
    def feature_size(self) -> int:
        """Size of the features of one position, over all aux layers."""
        return len(self.needs.aux_layers) * self._head.config.target_hidden_size

    @property
    def max_depth(self) -> int | None:
        """Most tokens of a chain that the head can draft; None for any number."""
        return self._head.config.max_depth

    def fits(self, head: Head) -> bool:
        """Return whether `continuing` can copy the weights of this head."""
        same = type(head) is type(self._head) and head.config == self._head.config
        return same and torch.equal(head.target_ids.to(self.draft_ids.device), self.draft_ids)

    @torch.no_grad()
    def continuing(self, before: HeadProposer, pool: KVPool) -> HeadProposer:
        """Return the proposer that drafts in `pool` from now on in place of `before`, whose KV layers are the same.

        It is `before` with the weights of this one, if they fit: what has captured them goes on.
        """
        if not before.fits(self._head):
            self.attach(pool)
            return self
        copy_packed(self._head, before._head)
        if isinstance(before.loop, ParallelLoop) and before.loop.mask_slot is not None:
            mask_slot = before._head.mask_slot()
            assert mask_slot is not None
            before.loop.mask_slot[1].copy_(mask_slot[1])
        return before

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees, and how deep. Raises ValueError for what this head cannot draft."""
        shape, max_depth = tree_shape(config), self.max_depth
        depth = config.max_draft_tokens if shape is None else shape.depth
        if max_depth is not None and depth > max_depth and config.name != "combined":  # whose other drafts are longer
            key = "proposer.tree" if shape is not None else f"proposer.max_draft_tokens={depth}"
            raise ValueError(f"{key}: this {self._head.name} head drafts {max_depth} tokens at most, not {depth}")
        choices = len(self.draft_ids)
        if isinstance(self._head, BlockHead) and self._head.corrects:
            choices = min(choices, self._head.num_candidates or config.candidates)
        if isinstance(shape, StaticShape) and shape.widest > choices:
            raise ValueError(f"proposer.tree: rank {shape.widest - 1}: the head drafts from {choices} tokens")
        self.shape, self._candidates = shape, config.candidates
        if isinstance(loop := getattr(self, "loop", None), BlockLoop):
            loop.candidates = config.candidates

    def attach(self, pool: KVPool) -> None:
        self._pool, attention, attend = pool, self._head.attention, None
        if attention is not None:
            attend = partial(
                pool.layers.attention,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                first_layer=self._first_layer,
            )
        if isinstance(self._head, BlockHead):
            assert attend is not None
            write = partial(pool.layers.writer, first_layer=self._first_layer)
            self.loop = BlockLoop(self._head, attend, write, self._candidates)
        else:
            self.loop = (ParallelLoop if self._head.parallel else TorchLoop)(self._head, attend)
        caches = pool.layers.caches[self._first_layer : self._first_layer + len(self.needs.kv_layers)]
        parts = None if self._head.parallel else self._head.draft_parts()
        if parts is not None and any(cache.dtype is not parts.decoder.dtype for cache in caches):
            parts = None
        native = None if parts is None else fuse_draft(parts)
        self._native = None if native is None else NativeLoop(self._head, native, caches)

    def places(self, budget: Budget) -> int:
        if self._head.parallel:
            return max(budget.nodes, self._head.scratch_places(budget.depth))
        return budget.nodes if self.shape is None else max(budget.nodes, self.shape.rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for request, rows in zip(requests, features.split(list(counts)), strict=True):
            if (num_new := request.computed - self._base.get(request.request_id, 0)) < len(rows):
                rows = rows[len(rows) - max(num_new, 0) :]
            if not len(rows):
                continue
            if not self.needs.kv_layers:  # without KV only the last position matters
                self._pending[request.request_id] = Pending(rows[-1:].clone())
            elif (pending := self._unread(request)) is None:
                self._pending[request.request_id] = Pending(rows)
            else:
                pending.add(rows)
            self._read.discard(request.request_id)
        if not self.needs.kv_layers:
            return
        # Few features are kept: prompts are read chunk by chunk, and texts without drafts every KEPT_ROWS positions.
        # Of a prompt's last chunk a graph could not read more than of a verify.
        verified = KEPT_ROWS if self.graphs is None else self.graphs.width
        prompts = [r.phase is Phase.PREFILL or count > verified for r, count in zip(requests, counts, strict=True)]
        pairs = zip(requests, prompts, strict=True)
        due = [request for request, prompt in pairs if self._count(request) >= (1 if prompt else KEPT_ROWS)]
        if due:
            self._fill(due)
            for request in due:
                last = self._pending[request.request_id].pieces[-1][-1:].clone()
                self._forget_features(request)
                if request.phase is Phase.DECODE:  # the next draft starts from it; reading it again changes nothing
                    self._pending[request.request_id] = Pending(last)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        if (replayed := self._replay(requests, budgets)) is not None:
            return replayed
        # Block verification takes chains only.
        chains = [i for i, request in enumerate(requests) if self.shape is None or request.params.acceptance == "block"]
        trees = [i for i in range(len(requests)) if i not in chains]
        drafted = [
            (draft([requests[i] for i in indices], [budgets[i] for i in indices]), indices)
            for draft, indices in ((self._chains, chains), (self._trees, trees))
            if indices
        ]
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
        if self.needs.kv_layers and self._count(request):
            self._fill([request])

    def start_tracking(self, request: Request) -> None:
        """Begin the head's KV at the next page boundary; no row attends to what lies before it."""
        if self.needs.kv_layers:
            assert self._pool is not None
            self._base[request.request_id] = self._pool.pages_for(request.computed) * self._pool.page_size

    def ready(self, request: Request) -> bool:
        base = self._base.get(request.request_id, 0)
        return self.tracks(request) and (not base or request.computed - base >= self.needs.warm_up)

    def features(self, requests: Sequence[Request]) -> list[Tensor]:
        """Return the pending features of each request, `[n, F]`."""
        return [self._pending[request.request_id].rows() for request in requests]

    def bases(self, requests: Sequence[Request]) -> list[int]:
        """Return the first slot of each request that the head was given."""
        return [self._base.get(request.request_id, 0) for request in requests]

    def tracks(self, request: Request) -> bool:
        """Return whether features of the request are pending."""
        return request.request_id in self._pending

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

    def _replay(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree | None:
        """Draft in a CUDA graph; None, with nothing done, if none fits or a draft needs the host."""
        if self.graphs is None or any(map(self._needs_host, requests)):
            return None
        drafted = self.graphs.draft(requests, budgets)
        if drafted is None:
            return None
        self.was_read(requests)
        tree, scores = drafted
        if self.confidence is not None and self.confidence.scoring:
            for request, budget, log_probs in zip(requests, budgets, scores, strict=True):
                if log_probs:
                    self.confidence.record(request, budget.depth, log_probs)
        return tree

    def _needs_host(self, request: Request) -> bool:
        """Return whether the host reads or changes the logits that it drafts from."""
        return request.params.acceptance == "block" or (self.shape is None and request.constraint is not None)

    def _chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        depths = [budget.depth for budget in budgets]
        deepest, limits = max(depths), upload(depths, self.draft_ids.device)
        confidence = self.confidence if self.confidence is not None and self.confidence.scoring else None
        parallel = self._head.parallel
        exits = None if confidence is None else exit_rows(confidence, requests, depths, deepest, parallel=parallel)
        unread = self._unread_rows(requests, drafting=True, spare=self.loop.spare_rows(deepest))
        draft_probs: dict[int, list[Tensor]] = {}  # by request, for block verification: one distribution per level
        constrained = any(request.constraint is not None for request in requests)
        adjusted = constrained or any(request.params.acceptance == "block" for request in requests)

        def adjust(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
            paths = torch.stack(list(drafted), dim=1).tolist() if drafted and constrained else [[]] * len(requests)
            logits = narrowed(requests, logits, paths, self.draft_ids)
            for row, probs in self._draft_probs(requests, logits, unread.parameters).items():
                draft_probs.setdefault(row, []).append(probs)
            return logits

        whole = self.loop if isinstance(self.loop, ParallelLoop) else self._native_for(unread)
        if whole is not None and not adjusted:
            chains = whole.chain(unread, limits, deepest, None if exits is None else HostExit(exits))
        else:
            terms = None if exits is None else upload(exits, limits.device, torch.float32)
            early_exit = None if terms is None else EarlyExit(terms, on_host=True)
            chains = self.loop.chain(unread, limits, deepest, early_exit, adjust if adjusted else None)
        self.was_read(requests)
        roots, lengths = torch.tensor([request.tokens[-1] for request in requests]), chains.length.cpu()
        if confidence is not None and chains.log_probs is not None:
            rows = zip(requests, depths, lengths.tolist(), chains.log_probs.tolist(), strict=True)
            for request, depth, length, log_probs in rows:
                confidence.record(request, depth, log_probs[:length])
        tree = DraftTree.chain(roots, chains.token.cpu(), lengths)
        tree.draft_probs = {row: torch.stack(probs[: depths[row]]) for row, probs in draft_probs.items()}
        return tree

    def _trees(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Grow every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own budget."""
        assert self.shape is not None
        deepest = max(budget.depth for budget in budgets)
        unread = self._unread_rows(requests, drafting=True, spare=self.loop.spare_rows(deepest))
        grown = (self._native_for(unread) or self.loop).tree(unread, self.shape, deepest)
        self.was_read(requests)
        return propose_best([request.tokens[-1] for request in requests], grown, budgets)

    def _native_for(self, unread: Unread) -> NativeLoop | None:
        restricts = unread.parameters is not None and unread.parameters.restricts
        return None if restricts else self._native

    def _draft_probs(
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
        rows = upload(wanted, logits.device)
        probs = warped_log_probs(logits[rows], parameters and parameters.rows(rows)).softmax(-1)
        full_probs = probs.new_zeros(len(wanted), self._head.config.vocab_size)
        full_probs[:, self.draft_ids] = probs
        return dict(zip(wanted, full_probs, strict=True))

    def _fill(self, requests: Sequence[Request]) -> None:
        """Write the head's KV of all pending positions of each request."""
        (self._native or self.loop).read(self._unread_rows(requests))
        self.was_read(requests)

    def _unread_rows(self, requests: Sequence[Request], *, drafting: bool = False, spare: int = 0) -> Unread:
        """Return all pending positions of each request, followed by `spare` rows.

        In a step that is retried, the second call returns the same rows, so that the same KV is written again.
        """
        features, bases, device = self.features(requests), self.bases(requests), self.draft_ids.device
        counts = [len(rows) for rows in features]
        starts = [request.computed - count for request, count in zip(requests, counts, strict=True)]
        tokens = [
            [*request.tokens[start + 1 : start + count + 1], *[0] * spare]
            for request, start, count in zip(requests, starts, counts, strict=True)
        ]
        widths = list(map(len, tokens))
        slots = [start + row for start, width in zip(starts, widths, strict=True) for row in range(width)]
        by_row = [[token for row in tokens for token in row], slots]
        last_rows = [end - 1 - spare for end in itertools.accumulate(widths)]
        roots, rows = [len(request.tokens) - 1 for request in requests], None
        if self.needs.kv_layers:
            assert self._pool is not None
            places = [start + 1 for start in starts]
            rows = self._pool.rows(requests, places, widths, first=1, bases=bases)
        ids, slots = upload_columns(by_row, [], device)
        ends, root, base = upload_columns([last_rows, roots, bases], [], device)
        return Unread(
            ids,
            torch.cat([F.pad(rows, (0, 0, 0, spare)) for rows in features] if spare else features),
            slots,
            rows,
            ends,
            root,
            base,
            root if rows is None else rows.request[ends],
            choice_parameters(requests, device, drafting=True) if drafting else None,
        )
