"""Drafts a chain or a tree with an EAGLE-3 head.

The head's KV is a layer of the engine's pool. What it makes of slot i (token t[i+1], feature f[i]) lies at place i + 1,
so that a page depends on the tokens up to its own end alone and can be shared by texts that go on differently. After a
verify the head runs over the accepted positions with the target's features, which overwrites what it wrote from its own
states; the last of these rows gives the first drafted tokens, and every further level costs one forward of the nodes
that are grown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from infer.kv_cache import KVPool, LayerShape, PooledAttention
from infer.proposers.base import Budget
from infer.proposers.shapes import StaticShape, TreeShape, propose_best
from infer.request import Phase, Request
from infer.sampling import choice_parameters
from infer.tree import DraftTree
from kernels.choose import ChoiceParameters, choice_keys, choose, law
from kernels.rows import AttentionRows
from models.heads.eagle3 import Eagle3Head


class HeadProposer:
    """`head` is packed for serving; `pool` holds its layers from `first_layer` on. `shape` None drafts chains."""

    name = "head"

    def __init__(self, head: Eagle3Head, first_layer: int, shape: TreeShape | None = None) -> None:
        layer = head.config.layer
        self.aux_layers = head.config.aux_layers
        self.kv_layers = (LayerShape(layer.num_kv_heads, layer.head_dim),) * layer.num_layers
        self.shape, self._head, self._first_layer = shape, head, first_layer
        self._draft_ids = head.draft_to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
        if isinstance(shape, StaticShape) and shape.widest > head.config.draft_vocab_size:
            raise ValueError(
                f"proposer.tree: rank {shape.widest - 1}: the head drafts from {head.config.draft_vocab_size} tokens"
            )
        self._pool: KVPool | None = None
        self._pending: dict[str, Tensor] = {}  # features of committed positions that the head has not read

    @property
    def module(self) -> nn.Module:
        return self._head

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def places(self, budget: Budget) -> int:
        return budget.nodes if self.shape is None else max(budget.nodes, self.shape.rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for request, rows in zip(requests, features.split(list(counts)), strict=True):
            earlier = self._pending.get(request.request_id)
            self._pending[request.request_id] = rows if earlier is None else torch.cat([earlier, rows])
        # A long prompt is read chunk by chunk, so that no more than a chunk of features is ever kept.
        prefilling = [request for request in requests if request.phase is Phase.PREFILL]
        if prefilling:
            self._read_pending(prefilling)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        active = [index for index, budget in enumerate(budgets) if budget.nodes > 0]
        idle = [index for index, budget in enumerate(budgets) if budget.nodes == 0]
        roots = DraftTree.chains([requests[i].tokens[-1] for i in idle], [()] * len(idle)) if idle else None
        if not active:
            assert roots is not None
            return roots
        # Block verification is for chains.
        chains = [i for i in active if self.shape is None or requests[i].params.acceptance == "block"]
        trees = [i for i in active if i not in chains]
        drafted = [
            (draft([requests[i] for i in own], [budgets[i] for i in own]), own)
            for draft, own in ((self._chains, chains), (self._trees, trees))
            if own
        ]
        if roots is not None:
            drafted.append((roots, idle))
        if len(drafted) == 1:
            return drafted[0][0]
        return DraftTree.stack([tree for tree, _ in drafted], [own for _, own in drafted])

    def synced(self, request: Request) -> int:
        pending = self._pending.get(request.request_id)
        # Slots before the first pending one are filled; they reach one place further than they count.
        return request.computed if pending is None else min(request.computed, request.computed - len(pending) + 1)

    def resume(self, request: Request) -> None:
        if request.last_features is not None:
            self._pending[request.request_id] = request.last_features[None]

    def release(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)

    def _chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        parameters = choice_parameters(requests, self._draft_ids.device, drafting=True)
        state = self._read_pending(requests)  # [B, H], of the slot before the root
        slots = [len(request.tokens) - 2 for request in requests]
        laws: dict[int, list[Tensor]] = {}
        self._keep_laws(laws, requests, range(len(requests)), state, parameters)
        tokens = self._choose(state, slots, parameters)
        drafts = [[token] for token in tokens.tolist()]
        going = list(range(len(requests)))
        for drafted in range(1, max(budget.depth for budget in budgets)):
            still = [place for place, index in enumerate(going) if budgets[index].depth > drafted]
            if len(still) < len(going):
                keep = torch.tensor(still, device=state.device)
                going = [going[place] for place in still]
                state, tokens, parameters = state[keep], tokens[keep], parameters and parameters.rows(keep)
            slots = [len(requests[index].tokens) - 2 + drafted for index in going]
            rows = self._rows([requests[index] for index in going], slots, [1] * len(going))
            state = self._head.step(tokens, state, rows.places - 1, self._attention(rows))
            self._keep_laws(laws, requests, going, state, parameters)
            tokens = self._choose(state, slots, parameters)
            for index, token in zip(going, tokens.tolist(), strict=True):
                drafts[index].append(token)
        tree = DraftTree.chains([request.tokens[-1] for request in requests], drafts)
        tree.laws = {index: torch.stack(rows) for index, rows in laws.items()}
        return tree

    def _keep_laws(
        self,
        laws: dict[int, list[Tensor]],
        requests: Sequence[Request],
        going: Sequence[int],
        state: Tensor,
        parameters: ChoiceParameters | None,
    ) -> None:
        """For block verification: the law over target ids that the next token is drawn from."""
        wanted = [
            place
            for place, index in enumerate(going)
            if requests[index].params.acceptance == "block" and requests[index].params.temperature > 0
        ]
        if not wanted:
            return
        rows = torch.tensor(wanted, device=state.device)
        own = law(self._head.logits(state[rows]), parameters and parameters.rows(rows)).softmax(-1)
        whole = own.new_zeros(len(wanted), self._head.config.layer.vocab_size)
        whole[:, self._draft_ids] = own
        for place, row in zip(wanted, whole.cpu(), strict=True):
            laws.setdefault(going[place], []).append(row)

    def _trees(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Grows every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own."""
        assert self.shape is not None
        assert self._pool is not None
        device, shape, batch = self._draft_ids.device, self.shape, len(requests)
        parameters = choice_parameters(requests, device, drafting=True)
        slots = [len(request.tokens) - 1 for request in requests]  # where the head's own rows begin
        start = torch.tensor(slots, device=device)[:, None]
        state = self._read_pending(requests)[:, None]  # [B, M, H] of the nodes that a level is grown from
        worth = torch.zeros(batch, 1, device=device)  # [B, M] cumulative log-probability of these
        above = torch.full((batch, 1), -1, device=device)  # [B, M] their candidate indices
        words = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, M] their rows in the head's KV
        grown: list[tuple[Tensor, Tensor, Tensor]] = []  # token, parent, score [B, M * R] of each level
        candidates = run = level = 0
        deepest = max(budget.depth for budget in budgets)
        while level < deepest and (fan_out := shape.fan_out(level + 1)):
            level += 1
            width = state.shape[1]
            owner = torch.arange(batch, device=device).repeat_interleave(width)
            positions = (start + level - 1).expand(-1, width).flatten()  # slot i drafts the choice at row i + 1
            keys = choice_keys(
                self._head.logits(state.flatten(0, 1)),
                parameters and parameters.rows(owner),
                positions,
                self._draft_ids,
            )
            best = keys.float().log_softmax(-1).topk(min(fan_out, keys.shape[1]))
            R = best.indices.shape[1]
            tokens = self._draft_ids[best.indices].view(batch, width * R)
            cumulative = (worth.flatten()[:, None] + best.values).view(batch, width * R)
            scores = shape.score(level, cumulative)
            grown.append((tokens, above.repeat_interleave(R, dim=1), scores))
            if level == deepest or not shape.fan_out(level + 1):
                break
            picked = shape.run_next(level, scores)  # [B, M']
            offsets = run + torch.arange(picked.shape[1], device=device)
            parent = picked // R
            words = words.gather(1, parent) | (torch.ones((), dtype=torch.int64, device=device) << offsets)
            rows = self._pool.level(requests, [slot + 1 for slot in slots], offsets, words, first=1)
            state = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1]))
            position = (start + level - 1).expand_as(picked).flatten()
            state = self._head.step(
                tokens.gather(1, picked).flatten(), state.flatten(0, 1), position, self._attention(rows)
            )
            state = state.view(*picked.shape, -1)
            worth, above = cumulative.gather(1, picked), candidates + picked
            run, candidates = run + picked.shape[1], candidates + tokens.shape[1]
        levels = [torch.full((token.shape[1],), depth) for depth, (token, _, _) in enumerate(grown, start=1)]
        token, parent, score = (torch.cat(parts, dim=1) for parts in zip(*grown, strict=True))
        return propose_best(
            [request.tokens[-1] for request in requests], token, parent, torch.cat(levels).to(device), score, budgets
        )

    def _rows(self, requests: Sequence[Request], slots: Sequence[int], counts: Sequence[int]) -> AttentionRows:
        """Addresses `counts[b]` slots of each request from `slots[b]` on."""
        assert self._pool is not None
        return self._pool.rows(requests, [slot + 1 for slot in slots], counts, first=1)

    def _attention(self, rows: AttentionRows) -> PooledAttention:
        assert self._pool is not None
        layer = self._head.config.layer
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        return self._pool.attention(rows, *sizes, first_layer=self._first_layer)

    def _choose(self, state: Tensor, slots: list[int], parameters: ChoiceParameters | None) -> Tensor:
        """The head's own choice `[B]` (target ids), under the noise that the target will meet at the same row."""
        positions = torch.tensor(slots, device=state.device) + 1  # slot i drafts what the target chooses at row i + 1
        return self._draft_ids[choose(self._head.logits(state), parameters, positions, self._draft_ids)]

    def _read_pending(self, requests: Sequence[Request]) -> Tensor:
        """Runs the head over all pending positions of each request; the state of each one's last slot `[B, H]`."""
        features = [self._pending[request.request_id] for request in requests]
        counts = [len(rows) for rows in features]
        starts = [request.computed - count for request, count in zip(requests, counts, strict=True)]
        shifted = [
            token
            for request, start, count in zip(requests, starts, counts, strict=True)
            for token in request.tokens[start + 1 : start + count + 1]
        ]
        aux = torch.cat(features).chunk(len(self.aux_layers), dim=-1)
        rows = self._rows(requests, starts, counts)
        tokens = torch.tensor(shifted, device=aux[0].device)
        state = self._head.step(tokens, self._head.fuse(aux), rows.places - 1, self._attention(rows))
        for request in requests:  # only now: had it failed, another try would still find them
            del self._pending[request.request_id]
        return state[torch.tensor(counts, device=state.device).cumsum(0) - 1]
