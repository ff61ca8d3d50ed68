"""Drafts a chain with an EAGLE-3 head.

The head's KV is a layer of the engine's pool. After a verify the head runs over the accepted positions with the
target's features, which overwrites what it wrote from its own states; the last of these rows gives the first drafted
token, and every further token costs one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kv_cache import KVPool, LayerShape, PooledAttention
from infer.request import Phase, Request
from infer.sampling import choice_parameters
from infer.tree import DraftTree
from kernels.choose import ChoiceParameters, choose
from models.heads.eagle3 import Eagle3Head


class HeadProposer:
    """`head` is packed for serving; `pool` holds its layers from `first_layer` on."""

    name = "head"

    def __init__(self, head: Eagle3Head, first_layer: int) -> None:
        layer = head.config.layer
        self.aux_layers = head.config.aux_layers
        self.kv_layers = (LayerShape(layer.num_kv_heads, layer.head_dim),) * layer.num_layers
        self._head, self._first_layer = head, first_layer
        self._draft_ids = head.draft_to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
        self._pool: KVPool | None = None
        self._pending: dict[str, Tensor] = {}  # features of committed positions that the head has not read

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for request, rows in zip(requests, features.split(list(counts)), strict=True):
            earlier = self._pending.get(request.request_id)
            self._pending[request.request_id] = rows if earlier is None else torch.cat([earlier, rows])
        # A long prompt is read chunk by chunk, so that no more than a chunk of features is ever kept.
        prefilling = [request for request in requests if request.phase is Phase.PREFILL]
        if prefilling:
            self._read_pending(prefilling)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> DraftTree:
        drafts: list[list[int]] = [[] for _ in requests]
        active = [index for index, budget in enumerate(budgets) if budget > 0]
        if active:
            self._draft([requests[i] for i in active], [budgets[i] for i in active], [drafts[i] for i in active])
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def release(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)

    def _draft(self, requests: list[Request], budgets: list[int], drafts: list[list[int]]) -> None:
        """Appends up to `budgets[b]` drafted target ids to `drafts[b]`."""
        parameters = choice_parameters(requests, self._draft_ids.device)
        state = self._read_pending(requests)  # [B, H], of the slot before the root
        slots = [len(request.tokens) - 2 for request in requests]
        tokens = self._choose(state, slots, parameters)
        self._append(drafts, tokens)
        going = list(range(len(requests)))
        for drafted in range(1, max(budgets)):
            still = [place for place, index in enumerate(going) if budgets[index] > drafted]
            if len(still) < len(going):
                keep = torch.tensor(still, device=state.device)
                going = [going[place] for place in still]
                state, tokens, parameters = state[keep], tokens[keep], parameters and parameters.rows(keep)
            slots = [len(requests[index].tokens) - 2 + drafted for index in going]
            attention, positions = self._attention([requests[index] for index in going], slots, [1] * len(going))
            state = self._head.step(tokens, state, positions, attention)
            tokens = self._choose(state, slots, parameters)
            self._append([drafts[index] for index in going], tokens)

    def _append(self, drafts: Sequence[list[int]], tokens: Tensor) -> None:
        for draft, token in zip(drafts, tokens.tolist(), strict=True):
            draft.append(token)

    def _attention(
        self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[PooledAttention, Tensor]:
        """The attention seam over `counts[b]` rows of each request from place `starts[b]` on, and their places."""
        assert self._pool is not None
        layer = self._head.config.layer
        rows = self._pool.rows(requests, starts, counts)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        return self._pool.attention(rows, *sizes, first_layer=self._first_layer), rows.places

    def _choose(self, state: Tensor, slots: list[int], parameters: ChoiceParameters | None) -> Tensor:
        """The head's own choice `[B]` (target ids), under the noise that the target will meet at the same row."""
        positions = torch.tensor(slots, device=state.device) + 1  # slot i drafts what the target chooses at row i + 1
        return self._draft_ids[choose(self._head.logits(state), parameters, positions, self._draft_ids)]

    def _read_pending(self, requests: Sequence[Request]) -> Tensor:
        """Runs the head over all pending positions of each request; the state of each one's last slot `[B, H]`."""
        features = [self._pending.pop(request.request_id) for request in requests]
        counts = [len(rows) for rows in features]
        starts = [request.computed - count for request, count in zip(requests, counts, strict=True)]
        shifted = [
            token
            for request, start, count in zip(requests, starts, counts, strict=True)
            for token in request.tokens[start + 1 : start + count + 1]
        ]
        aux = torch.cat(features).chunk(len(self.aux_layers), dim=-1)
        attention, places = self._attention(requests, starts, counts)
        tokens = torch.tensor(shifted, device=aux[0].device)
        state = self._head.step(tokens, self._head.fuse(aux), places, attention)
        return state[torch.tensor(counts, device=state.device).cumsum(0) - 1]
