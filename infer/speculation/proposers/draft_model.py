"""Drafts a chain with a second, smaller model that shares the target's vocabulary; its KV lies in the engine's pool.

Accepted tokens that it drafted are not run again, since their KV depends on the tokens alone. So a round costs one
forward over the tokens that it has not seen, and one per further drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.request import Phase, Request
from infer.sampling.batch import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.tree import DraftTree
from kernels.choose import choose
from models.targets.llama import LlamaTarget


class DraftModelProposer:
    """Drafts with `model`, packed for serving; once attached, `pool` holds its KV layers from `first_layer` on."""

    name = "draft_model"
    aux_layers: tuple[int, ...] = ()
    warm_up = 0

    def __init__(self, model: LlamaTarget) -> None:
        config = model.config
        self.kv_layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.context = config.max_position_embeddings
        self._model = model
        self._pool: KVPool | None = None
        self._first_layer = 0
        self._seen: dict[str, list[int]] = {}  # tokens whose KV is written, in order
        self._agreed: dict[str, int] = {}  # how many of the first of them surely are the request's

    @property
    def module(self) -> nn.Module:
        return self._model

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self._pool, self._first_layer = pool, first_layer

    def places(self, budget: Budget) -> int:
        return budget.depth

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        # In prefill it runs over each chunk right after the target; any other tokens are read by the next draft.
        prefilling = [r for r in requests if r.phase is Phase.PREFILL and r.computed <= self.context]
        if prefilling:
            self._read(prefilling, [request.computed for request in prefilling])

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        drafts: list[list[int]] = [[] for _ in requests]
        depths = [min(b.depth, self.context - len(r.tokens)) for r, b in zip(requests, budgets, strict=True)]
        active = [index for index, depth in enumerate(depths) if depth > 0]
        if active:
            self._draft(requests, depths, active, drafts)
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def synced(self, request: Request) -> int:
        return min(request.computed, len(self._seen.get(request.request_id, ())))

    def resume(self, request: Request) -> None:
        self._seen[request.request_id] = request.tokens[: request.computed]
        self._agreed[request.request_id] = request.computed

    def release(self, request: Request) -> None:
        self._seen.pop(request.request_id, None)
        self._agreed.pop(request.request_id, None)

    def catch_up(self, request: Request) -> None:
        if request.computed <= self.context:
            self._read([request], [request.computed])

    def start_tracking(self, request: Request) -> None:
        pass  # its next draft reads the whole text

    def ready(self, request: Request) -> bool:
        return True

    def _draft(
        self, requests: Sequence[Request], depths: Sequence[int], active: list[int], drafts: list[list[int]]
    ) -> None:
        hidden = self._read([requests[i] for i in active], [len(requests[i].tokens) for i in active])
        while True:
            batch = [requests[index] for index in active]
            logits = self._model.logits(hidden)
            device = logits.device
            positions = torch.tensor([len(requests[i].tokens) - 1 + len(drafts[i]) for i in active], device=device)
            tokens = choose(logits, choice_parameters(batch, device, drafting=True), positions).tolist()
            for index, token in zip(active, tokens, strict=True):
                drafts[index].append(token)
            active = [index for index in active if len(drafts[index]) < depths[index]]
            if not active:
                return
            batch = [requests[index] for index in active]
            starts = [len(requests[i].tokens) - 1 + len(drafts[i]) for i in active]
            hidden = self._forward(batch, starts, [drafts[index][-1:] for index in active])

    def _read(self, requests: Sequence[Request], ends: Sequence[int]) -> Tensor:
        """Extend the KV to `tokens[:end]` of each request; return the hidden states of their last tokens `[B, H]`."""
        starts, new = [], []
        for request, end in zip(requests, ends, strict=True):
            seen = self._seen.get(request.request_id, [])
            # The last token is always run again, as its hidden state is needed.
            start = min(common_prefix(seen, request.tokens, self._agreed.get(request.request_id, 0)), end - 1)
            starts.append(start)
            new.append(request.tokens[start:end])
        hidden = self._forward(requests, starts, new)
        self._agreed.update((request.request_id, end) for request, end in zip(requests, ends, strict=True))
        return hidden

    def _forward(self, requests: Sequence[Request], starts: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        assert self._pool is not None
        config = self._model.config
        counts = [len(tokens) for tokens in new]
        rows = self._pool.rows(requests, starts, counts)
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        attention = self._pool.layers.attention(rows, *sizes, first_layer=self._first_layer)
        ids = torch.tensor([token for tokens in new for token in tokens], device=rows.request.device)
        hidden = self._model(ids, rows.places, attention).hidden
        for request, start, tokens in zip(requests, starts, new, strict=True):
            seen = self._seen.setdefault(request.request_id, [])
            seen[start:] = tokens
        return hidden[torch.tensor(counts, device=hidden.device).cumsum(0) - 1]


def common_prefix(first: Sequence[int], second: Sequence[int], agreed: int) -> int:
    """Return the length of the common prefix of two sequences, which is at least `agreed`."""
    length = agreed
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
