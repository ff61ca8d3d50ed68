"""Drafts a chain with a second, smaller model that shares the target's vocabulary; its KV lies in the engine's pool.

Accepted tokens that it drafted are not run again, since their KV depends on the tokens alone. So a round costs one
forward over the tokens that it has not seen, and one per further drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.request import Phase, Request
from infer.sampling.batch import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.proposers.base import Proposer
from infer.speculation.tree import DraftTree
from kernels.choose import choose
from kernels.upload import upload
from models.targets.llama import LlamaTarget


class DraftModelProposer(Proposer):
    """Drafts with `model`, packed for serving; once attached, `pool` holds its KV layers from `first_layer` on."""

    name = "draft_model"

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

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        # In prefill it runs over each chunk right after the target; any other tokens are read by the next draft.
        prefilling = [r for r in requests if r.phase is Phase.PREFILL and r.computed <= self.context]
        if prefilling:
            self._read(prefilling, [request.computed for request in prefilling])

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        drafts: list[list[int]] = [[] for _ in requests]
        depths = [min(b.depth, self.context - len(r.tokens)) for r, b in zip(requests, budgets, strict=True)]
        for level in range(max(depths)):
            active = [index for index, depth in enumerate(depths) if depth > level]
            batch = [requests[index] for index in active]
            ends = [len(request.tokens) + level for request in batch]  # tokens before the one that is drafted
            if level:
                hidden = self._forward(batch, [end - 1 for end in ends], [drafts[index][-1:] for index in active])
            else:
                hidden = self._read(batch, ends)
            logits, positions = self._model.logits(hidden), upload(ends, hidden.device) - 1
            chosen = choose(logits, choice_parameters(batch, logits.device, drafting=True), positions)
            for index, token in zip(active, chosen.tolist(), strict=True):
                drafts[index].append(token)
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
        ids = upload([token for tokens in new for token in tokens], rows.request.device)
        hidden = self._model(ids, rows.places, attention).hidden
        for request, start, tokens in zip(requests, starts, new, strict=True):
            seen = self._seen.setdefault(request.request_id, [])
            seen[start:] = tokens
        return hidden[upload(counts, hidden.device).cumsum(0) - 1]


def common_prefix(first: Sequence[int], second: Sequence[int], agreed: int) -> int:
    """Return the length of the common prefix of two sequences, which is at least `agreed`."""
    length = agreed
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
