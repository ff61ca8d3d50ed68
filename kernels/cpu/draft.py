"""Levels of chains with a recurrent head in C (draft.c), one call each."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.choose import ChoiceParameters
from kernels.cpu import attention as paged
from kernels.cpu.decoder import arguments_of, one_after_another
from kernels.cpu.library import LANES, library
from kernels.rows import AttentionRows

if TYPE_CHECKING:
    from kernels.draft import DraftParts

NUMBERS = ("ids", "positions", "committed", "offset", "request")  # of a row


class Arguments(ctypes.Structure):
    """draft_args of draft.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decoder", "joined", "lm_head", "embedding", "cos", "sin", "norm")),
        *((name, ctypes.c_void_p) for name in ("draft_ids", *NUMBERS, "low", "high", "temperature")),
        *((name, ctypes.c_void_p) for name in ("tokens", "turned", "normed", "logits", "chosen", "masses", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "chains", "dim", "joined_threads", "threads")),
    )


def supported(parts: DraftParts) -> bool:
    """Whether draft.c takes these: all of one dtype and on the host, linears read by linear.c as they come."""
    dtype, found = parts.decoder.dtype, [own for own in (parts.joined, parts.lm_head) if own is not None]
    if any(own.native is None or own.native.arguments is None or own.native.dtype is not dtype for own in found):
        return False
    tensors = [own for own in (parts.embedding, *parts.rotary, parts.norm) if own is not None]
    if any(own.dtype is not dtype or not own.is_contiguous() or own.device.type != "cpu" for own in tensors):
        return False
    return parts.lm_head.out_features % LANES == 0


class NativeDraft:
    """Of parts that are `supported`; their tensors must stay where they are."""

    def __init__(self, parts: DraftParts) -> None:
        found = library()
        assert found is not None
        self.draft, self.read, self.parts = found.draft, found.draft_read, parts
        self._ids, self._lm_head = parts.draft_ids.contiguous(), arguments_of(parts.lm_head)
        self._joined = None if parts.joined is None else arguments_of(parts.joined)
        assert parts.lm_head.native is not None, "supported() has asked"
        self.lm_head, self.joined = parts.lm_head.native, parts.joined and parts.joined.native
        cos, sin = parts.rotary
        self.arguments = Arguments(
            joined=None if self._joined is None else ctypes.addressof(self._joined),
            lm_head=ctypes.addressof(self._lm_head),
            embedding=parts.embedding.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            norm=None if parts.norm is None else parts.norm.data_ptr(),
            draft_ids=self._ids.data_ptr(),
            dim=cos.shape[1],
        )


class NativeChains:
    """One draft of C chains. All that C reads and writes of it lies here."""

    def __init__(
        self,
        native: NativeDraft,
        ids: Tensor,
        state: Tensor,
        positions: Tensor,
        rows: AttentionRows,
        caches: Sequence[Tensor],
        parameters: ChoiceParameters | None,
        levels: int,
    ) -> None:
        """ids, positions `[R]`, state `[R, H]` and `rows`: what waits to be read, of each chain one row at least.

        caches: of the head's layers. parameters `[C]` restrict nothing. `levels`: as many as will be drafted, or more;
        that many positions more are in the rotary table.
        """
        assert parameters is None or not parameters.restricts
        self._native, parts, size = native, native.parts, state.element_size()
        (count, hidden), chains = state.shape, len(rows.counts)
        self._chains, self._rows = chains, count
        self._state = state.clone(memory_format=torch.contiguous_format)
        self._numbers = torch.stack([ids, positions, rows.committed, rows.offset, rows.request])  # [5, R]
        last = torch.tensor([end - 1 for end in accumulate(rows.counts)])
        self._seeds, self._temperature = torch.zeros(2, chains, dtype=torch.int64), torch.zeros(chains)
        if parameters is not None:
            self._seeds = torch.stack([parameters.seed_low, parameters.seed_high])
            self._temperature = parameters.temperature.clone()
        self._masses, self._table = torch.empty(chains), rows.table.contiguous()
        first, step = self._numbers.data_ptr(), count * self._numbers.element_size()
        numbers = {name: first + step * row for row, name in enumerate(NUMBERS)}
        self._attention = paged.Arguments(
            table=self._table.data_ptr(),
            request=numbers["request"],
            committed=numbers["committed"],
            offset=numbers["offset"],
            heads=parts.num_heads,
            kv_heads=parts.num_kv_heads,
            dim=native.arguments.dim,
            pages=self._table.shape[1],
            page_size=rows.page_size,
            longest=-(-(rows.longest + levels) // LANES) * LANES,
            first=rows.first,
        )
        self._decoder, self._held = parts.decoder.begin(count, self._attention, caches, {})
        # Of the first level's rows each chain's last one goes on.
        self._last, self._ends = last, self._numbers[:, last]
        self._kept = paged.Arguments.from_buffer_copy(self._attention)
        self._kept.rows, first, step = chains, self._ends.data_ptr(), chains * self._ends.element_size()
        for row, name in enumerate(NUMBERS):
            if name in ("committed", "offset", "request"):
                setattr(self._kept, name, first + step * row)
        self._decoder.kept, self._decoder.keep = ctypes.addressof(self._kept), last.data_ptr()
        sizes = (
            count * hidden * size * (1 if parts.joined is None else 2),
            2 * count * native.arguments.dim * size,
            chains * hidden * size,
            chains * parts.lm_head.out_features * size,
            chains * last.element_size(),
            4 * max(native.lm_head.room(chains), native.joined.room(count) if native.joined else 0),
            0 if parts.decoder.final_norm is None else count * hidden * size,
        )
        self._room, starts = one_after_another(sizes)
        self._decoder.x = self._state.data_ptr()
        self._decoder.hidden = self._decoder.x if parts.decoder.final_norm is None else starts[-1]
        a = self._arguments = Arguments.from_buffer_copy(native.arguments)
        a.tokens, a.turned, a.normed, a.logits, a.chosen, a.scratch = starts[:-1]
        for name, pointer in numbers.items():
            setattr(a, name, pointer)
        a.low, a.high = (row.data_ptr() for row in self._seeds)
        a.decoder = ctypes.addressof(self._decoder)
        a.temperature = self._temperature.data_ptr()

    def draft(self, *, likely: bool) -> tuple[list[int], list[float] | None]:
        """One more token of each chain (target ids); with `likely` how likely the head finds it, log-probabilities."""
        a = self._arguments
        a.chains, a.masses = self._chains, self._masses.data_ptr() if likely else None
        a.threads = self._native.lm_head.threads(self._chains)
        self._native.draft(self._ready())
        self._rows, self._decoder.kept = self._chains, None
        tokens = self._numbers[0, : self._chains].tolist()
        if not likely:
            return tokens, None
        return tokens, [-math.log(mass) for mass in self._masses[: self._chains].tolist()]

    def read(self) -> None:
        """Instead of drafting: only what later rows see of these is made."""
        self._kept.rows = 0
        self._native.read(self._ready())

    def _ready(self) -> int:
        """Where C finds the arguments, for the rows that there are now."""
        a, native = self._arguments, self._native
        a.rows = self._attention.rows = self._rows
        a.joined_threads = native.joined.threads(self._rows) if native.joined else 1
        self._decoder.threads = native.parts.decoder.threads(self._rows)
        return ctypes.addressof(a)

    def keep(self, places: Sequence[int]) -> None:
        """Only these chains go on, in this order: ascending."""
        index, count = torch.tensor(places), len(places)
        for own in (self._numbers, self._seeds):
            own[:, :count] = own[:, index]
        for own in (self._state, self._temperature):
            own[:count] = own[index]
        self._rows = self._chains = count
