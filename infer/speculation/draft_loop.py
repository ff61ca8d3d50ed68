"""Drafts with a head on tensors of fixed sizes, without the host: what draft graphs and round graphs capture.

The rows that a head has not read yet are padded. The KV of a request's padding rows lies after that of its own rows and
is overwritten, in order, before any row attends to it; padding requests use the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kvcache.pool import KVPool
from infer.request import Request
from infer.sampling.batch import choice_parameters
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.proposers.parallel_head import ParallelHeadProposer
from infer.speculation.tree_shapes import Children, Run, grow
from kernels.choose import ChoiceParameters, choose
from kernels.rows import AttentionRows
from models.attention import Attention, no_attention

NUMBERS = 11  # per request: slot, first, last, root, base, top_k, 2 seed halves; fp64 temperature, top_p, min_p


class Unread(NamedTuple):
    """The inputs of a draft for B requests.

    Row j of W is the head's slot `first + j - 1`: the token at position `first + j` and the features of the position
    before it.
    """

    ids: Tensor  # [B, W]
    features: Tensor  # [B, W, F]
    slot: Tensor  # [B] row of the block table
    first: Tensor  # [B] place of row 0 in the head's KV layers
    last: Tensor  # [B] the last row that is not padding; it holds the root
    root: Tensor  # [B] the root's position
    base: Tensor  # [B] the head's KV begins at this place, a multiple of the page size
    parameters: ChoiceParameters


class Inputs:
    """Holds `Unread` for up to `batch` requests of `width` rows in tensors at fixed addresses.

    The host fills them while nothing runs that reads them.
    """

    def __init__(
        self, pool: KVPool, batch: int, width: int, features: int, dtype: torch.dtype, *, pinned: bool
    ) -> None:
        self._pool, self._width = pool, width
        size = batch * (width + NUMBERS)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.int64, device=pool.device)
        self.features = torch.zeros(batch, width, features, dtype=dtype, device=pool.device)

    def of(self, batch: int, *, restricts: bool) -> Unread:
        """Return `Unread` of the first `batch` requests. Must be called inside the function that is captured."""
        ids, numbers = self._fields(self._device, batch)
        slot, first, last, root, base, top_k, low, high = numbers[:8]
        temperature, top_p, min_p = numbers[8:].view(torch.float64).float()
        parameters = ChoiceParameters(temperature, top_k, top_p, min_p, low, high, restricts)
        return Unread(ids, self.features[:batch], slot, first, last, root, base, parameters)

    def fill(
        self,
        batch: int,
        requests: Sequence[Request] = (),
        features: Sequence[Tensor] = (),
        bases: Sequence[int] = (),
    ) -> bool:
        """Write the requests, with `features[b]` `[n, F]` of their last positions, and padding up to `batch`.

        Returns whether a row uses top-k, top-p or min-p.
        """
        ids, numbers = self._fields(self._host, batch)
        ids.zero_()
        numbers.zero_()
        numbers[0] = self._pool.null_row
        numbers[1] = 1
        fractions = numbers[8:].view(torch.float64)
        fractions[1] = 1.0  # top-p
        for b, (request, rows, base) in enumerate(zip(requests, features, bases, strict=True)):
            count = len(rows)
            start = request.computed - count
            ids[b, :count] = torch.tensor(request.tokens[start + 1 : start + count + 1])
            numbers[:5, b] = torch.tensor([request.slot, start + 1, count - 1, len(request.tokens) - 1, base])
        p = choice_parameters(requests, torch.device("cpu"), drafting=True)
        if p is not None:
            filled = slice(len(requests))
            numbers[5, filled], numbers[6, filled], numbers[7, filled] = p.top_k, p.seed_low, p.seed_high
            fractions[0, filled], fractions[1, filled], fractions[2, filled] = p.temperature, p.top_p, p.min_p
        size = batch * (self._width + NUMBERS)
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        if features and self.features.shape[-1]:
            index = [b * self._width + row for b, rows in enumerate(features) for row in range(len(rows))]
            into = self.features.flatten(0, 1)
            into.index_copy_(0, torch.tensor(index, device=self._pool.device), torch.cat(list(features)))
        return p is not None and p.restricts

    def _fields(self, flat: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        ids, numbers = flat[: batch * (self._width + NUMBERS)].split([batch * self._width, batch * NUMBERS])
        return ids.view(batch, self._width), numbers.view(NUMBERS, batch)


class DraftLoop:
    """Runs a head over its unread rows and drafts with it, each depth from the one before.

    `longest`: bound on the number of keys that a row attends to.
    """

    def __init__(self, proposer: HeadProposer, pool: KVPool, longest: int) -> None:
        self._proposer, self._head, self._pool, self._longest = proposer, proposer.module, pool, longest

    def chain(self, unread: Unread, depth: int) -> Tensor:
        """Draft chains; return target ids `[B, depth]`."""
        table, drafted = self._table(unread), list[Tensor]()
        state = self._read(unread, table)
        draft_ids = self._proposer.draft_ids
        for level in range(depth):
            if level:
                rows = self._rows(unread, table, unread.root + level, torch.zeros_like(unread.root), 1)
                state = self._head.step(drafted[-1], state, unread.root + level - 1, self._attention(rows), level)
            # slot i drafts the token that the target chooses at position i + 1
            logits = self._head.logits(state, level)
            drafted.append(draft_ids[choose(logits, unread.parameters, unread.root + level, draft_ids)])
        return torch.stack(drafted, dim=1)

    def tree(self, unread: Unread) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft trees as deep as the shape allows; return what infer.speculation.tree_shapes.grow does."""
        shape = self._proposer.shape
        assert shape is not None
        return grow(shape, shape.depth, unread.root, *self._growing(unread))

    def _growing(self, unread: Unread) -> tuple[Children, Run]:
        table = self._table(unread)

        def address(offsets: Tensor, tree_mask: Tensor) -> AttentionRows:
            width = tree_mask.shape[1]
            places = (unread.root + 1).repeat_interleave(width)
            return self._rows(unread, table, places, offsets.repeat(len(unread.root)), width, tree_mask.flatten())

        return self._proposer.growing(self._read(unread, table), unread.root, unread.parameters, address)

    def _read(self, unread: Unread, table: Tensor) -> Tensor:
        """Run the head over the unread rows; return each request's last state `[B, S]`."""
        index = torch.arange(len(unread.root), device=unread.root.device)
        if not self._proposer.kv_layers:  # without KV only the last row matters
            state = self._fuse(unread.features[index, unread.last])
            return self._head.step(
                unread.ids[index, unread.last], state, unread.first + unread.last - 1, no_attention, 0
            )
        state = self._run(unread, table, unread.ids, self._fuse(unread.features.flatten(0, 1)))
        return state[index, unread.last]

    def _run(self, unread: Unread, table: Tensor, ids: Tensor, state: Tensor) -> Tensor:
        """Run depth 0 of the head over ids `[B, N]` and fused states `[B * N, S]`, from each `first` place on."""
        batch, width = ids.shape
        offset = torch.arange(width, device=ids.device)
        rows = self._rows(unread, table, unread.first.repeat_interleave(width), offset.repeat(batch), width)
        positions = (unread.first[:, None] + offset - 1).flatten()
        return self._head.step(ids.flatten(), state, positions, self._attention(rows), 0).unflatten(0, (batch, width))

    def _fuse(self, features: Tensor) -> Tensor:
        return self._head.fuse(features.chunk(len(self._head.config.aux_layers), dim=-1))

    def _table(self, unread: Unread) -> Tensor:
        """Return the requests' block tables `[B, P]` from their bases on."""
        table = self._pool.table[unread.slot]
        columns = torch.arange(table.shape[1], device=table.device) + unread.base[:, None] // self._pool.page_size
        return table.gather(1, columns.clamp(max=table.shape[1] - 1))

    def _rows(
        self, unread: Unread, table: Tensor, place: Tensor, offset: Tensor, width: int, tree_mask: Tensor | None = None
    ) -> AttentionRows:
        """Address `width` rows of each request at `place + offset`, both `[B * width]`."""
        batch = len(unread.root)
        request = torch.arange(batch, device=place.device).repeat_interleave(width)
        committed = place - unread.base.repeat_interleave(width)
        size, counts = self._pool.page_size, (width,) * batch
        return AttentionRows(table, request, committed, offset, tree_mask, size, self._longest, counts, first=1)

    def _attention(self, rows: AttentionRows) -> Attention:
        return self._proposer.attend(rows) if self._proposer.kv_layers else no_attention


class ParallelDraftLoop(DraftLoop):
    """Drafts with a head that predicts every depth in one forward."""

    _proposer: ParallelHeadProposer

    def chain(self, unread: Unread, depth: int) -> Tensor:
        logits = self._all_logits(unread, depth)
        positions = unread.root[:, None] + torch.arange(depth, device=unread.root.device)
        owner = torch.arange(len(unread.root), device=unread.root.device).repeat_interleave(depth)
        draft_ids = self._proposer.draft_ids
        chosen = choose(logits.flatten(0, 1), unread.parameters.rows(owner), positions.flatten(), draft_ids)
        return draft_ids[chosen].view(-1, depth)

    def _growing(self, unread: Unread) -> tuple[Children, Run]:
        assert self._proposer.shape is not None
        logits = self._all_logits(unread, self._proposer.shape.depth)
        return self._proposer.growing_parallel(logits, unread.root, unread.parameters)

    def _all_logits(self, unread: Unread, depth: int) -> Tensor:
        """Return the logits `[B, depth, Vd]`."""
        table, slot = self._table(unread), self._proposer.mask_slot
        if slot is None:
            return self._head.all_logits(self._read(unread, table), depth)
        # The last row is followed by one mask slot per further depth; rows beyond are padding.
        mask_id, mask_state = slot
        row = torch.arange(unread.ids.shape[1] + depth - 1, device=unread.ids.device)
        masked = row > unread.last[:, None]
        ids = F.pad(unread.ids, (0, depth - 1)).masked_fill(masked, mask_id)
        state = F.pad(self._fuse(unread.features), (0, 0, 0, depth - 1))
        state = torch.where(masked[..., None], mask_state, state)
        states = self._run(unread, table, ids, state.flatten(0, 1))
        index = unread.last[:, None] + torch.arange(depth, device=unread.ids.device)
        wanted = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
        return self._head.logits(wanted.flatten(0, 1), 0).unflatten(0, index.shape)


def draft_loop(proposer: HeadProposer, pool: KVPool, longest: int) -> DraftLoop:
    kind = ParallelDraftLoop if isinstance(proposer, ParallelHeadProposer) else DraftLoop
    return kind(proposer, pool, longest)
