"""What proposers share that draft with a head or a draft model, whose KV lies in layers of the engine's pool."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.config import ProposerConfig
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.request import Request
from infer.sampling.choose import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.proposers.base import Needs, NoProposer, Proposer, Tracker
from infer.speculation.proposers.draft_loops import draft_loop
from infer.speculation.proposers.draft_loops.base import DraftLoop, Unread
from infer.speculation.tree import DraftTree
from infer.speculation.tree_shapes import StaticShape, TreeShape, propose_best, tree_shape
from kernels.slower import say_slower, slower_layers
from kernels.upload import upload_columns
from models.heads.base import Head
from models.layers import Linear


class ModelProposer(Proposer, Tracker):
    """Drafts with `head`, packed for serving. `shape` None: chains."""

    module: Head
    loop: DraftLoop
    _first_place = 0  # that the model's KV may lie at
    shape: TreeShape | None

    def __init__(self, head: Head, config: ProposerConfig, weights_key: str) -> None:
        linears = [module.packed for module in head.modules() if isinstance(module, Linear)]
        say_slower(slower_layers((packed for packed in linears if packed is not None), weights_key))
        shape = head.config.attention
        layers = () if shape is None else (LayerShape(shape.num_kv_heads, shape.head_dim),) * shape.layers
        self.needs = Needs(kv_layers=layers)
        self.module, self.loop = head, draft_loop(head)
        self._pool: KVPool | None = None
        self.set_drafts(config)

    @property
    def tracker(self) -> Tracker:
        return self

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees. Raises ValueError for a tree wider than what it can draft."""
        shape, choices = tree_shape(config), self._choices(config)
        if isinstance(shape, StaticShape) and shape.widest > choices:
            drafter = self.name.replace("_", " ")
            raise ValueError(f"proposer.tree: rank {shape.widest - 1}: the {drafter} drafts from {choices} tokens")
        self.shape = shape

    def places(self, budget: Budget) -> int:
        return max(budget.nodes, self.loop.places(budget.depth, self.shape))

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Requests with a depth of 0 get no drafts, those under block verification, which takes no trees, chains."""
        groups: dict[str, list[int]] = {}
        for row, (request, budget) in enumerate(zip(requests, budgets, strict=True)):
            is_chain = self.shape is None or request.params.acceptance == "block"
            groups.setdefault("none" if budget.depth <= 0 else "chains" if is_chain else "trees", []).append(row)
        draft = {"none": NoProposer().propose, "chains": self._chains, "trees": self._trees}
        trees = [draft[kind]([requests[i] for i in rows], [budgets[i] for i in rows]) for kind, rows in groups.items()]
        return trees[0] if len(trees) == 1 else DraftTree.stack(trees, list(groups.values()))

    def _choices(self, config: ProposerConfig) -> int:
        """Return from how many tokens a depth is drafted."""
        return self.loop.choices(config.candidates)

    def _attach(self, pool: KVPool, first_layer: int) -> None:
        self._pool = pool
        self.loop.attach(pool.layers, first_layer)

    @abstractmethod
    def _chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Draft chains of these depths, at least one token each."""

    def _trees(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Grow every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own budget."""
        assert self.shape is not None
        deepest = max(budget.depth for budget in budgets)
        grown = self.loop.tree(self._unread_rows(requests, deepest), self.shape, deepest)
        self.was_read(requests)
        return propose_best([request.tokens[-1] for request in requests], grown, budgets)

    def _fill(self, requests: Sequence[Request]) -> None:
        """Write the KV of the committed positions of each request that the model has not read."""
        self.loop.read(self._unread_rows(requests))
        self.was_read(requests, drafting=False)

    def _unread_rows(self, requests: Sequence[Request], depth: int = 0) -> Unread:
        """Return what the model has not read of each request, and the spare rows of a draft of this depth, if any.

        In a step that is retried, the second call returns the same rows, so that the same KV is written again.
        """
        drafting, spare, device = depth > 0, self.loop.spare_rows(depth) if depth else 0, self.loop.draft_ids.device
        starts, counts, features = self._unread_slots(requests, drafting=drafting)
        bases, widths = self.bases(requests), [count + spare for count in counts]
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
        row_ids, row_slots = upload_columns([ids, slots], [], device)
        ends, root, base = upload_columns([last_rows, roots, bases], [], device)
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
        self, requests: Sequence[Request], *, drafting: bool
    ) -> tuple[list[int], list[int], list[Tensor]]:
        """Return the first slot of each request that the model has not read, their number, and their features.

        Features are `[n, F]` each. Slot i holds token t[i+1], at place i + 1. For a draft the last slot is the root's,
        otherwise that of the last committed position.
        """

    def bases(self, requests: Sequence[Request]) -> list[int]:
        """Return the place at which the model's KV of each request begins."""
        return [0] * len(requests)

    @abstractmethod
    def was_read(self, requests: Sequence[Request], *, drafting: bool = True) -> None:
        """Take note that the rows which `_unread_rows` returned were read."""
