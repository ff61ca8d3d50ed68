"""Fused drafting of chains and trees with a recurrent head: one call per level, on a CPU (kernels/cpu/draft.c).

Elsewhere a level is three calls: the head's step, its logits and the choice.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import AttentionArguments
from kernels.cpu.declarations import copied, structure
from kernels.cpu.library import library
from kernels.decoder import NativeDecoder, allocate_aligned
from kernels.dispatch import LANES, address, uses_triton
from kernels.linear import PackedLinear, linear_arguments
from kernels.operands import ChoiceParameters
from kernels.rows import AttentionRows

DraftArguments = structure("draft_args")  # of draft.c
Branch = structure("branch_args")  # of draft.c


class DraftParts(NamedTuple):
    """A recurrent head: it computes each state from the previous token's embedding and the previous state.

    Its layers read both concatenated, or with `joined` projected by a linear layer, maybe each after a norm. All norms
    are `centered` if those of the layers are.
    """

    decoder: NativeDecoder
    num_heads: int
    num_kv_heads: int
    embedding: Tensor | PackedLinear  # [V, H]
    rotary: tuple[Tensor, Tensor]  # cos and sin [P, D]
    joined: PackedLinear | None  # [H, 2 H]: embedding, then state; with `state_first` the reverse
    norm: Tensor | None  # [H] between the state and the LM head
    lm_head: PackedLinear  # [Vd, H]
    draft_ids: Tensor  # [Vd] target ids
    token_norm: Tensor | None = None  # [H]
    state_norm: Tensor | None = None  # [H]
    state_first: bool = False
    zero_first: bool = False  # the embedding of a row at position 0 is zero
    from_slot: bool = False  # windows of drafted rows are counted from the slot that a draft starts from


def fuse_draft(parts: DraftParts) -> NativeDraft | None:
    """Return the fused draft of a head, None if no kernel supports these parts."""
    if uses_triton(parts.draft_ids.device) or not runs_in_c(parts):
        return None
    return NativeDraft(parts)


NUMBERS = ("ids", "positions", "committed", "offset", "request")  # integers of each row
ADDRESSED = NUMBERS[2:]  # those that attention reads
# The fields of draft.c's arguments that point to the rows of each array of SharedArrays.
FIELDS = {"numbers": NUMBERS, "seeds": ("low", "high")} | {
    name: (name,) for name in ("temperature", "columns", "keys", "masses")
}


def runs_in_c(parts: DraftParts) -> bool:
    """Return whether draft.c supports these parts: one dtype, on the CPU, linears that linear.c reads directly."""
    dtype, (dense, blocks) = parts.decoder.dtype, stored_embedding(parts)
    norms = parts.norm, parts.token_norm, parts.state_norm
    linears = [part for part in (parts.joined, parts.lm_head, blocks) if part is not None]
    if any(part.native is None or part.native.dtype is not dtype for part in linears):
        return False
    tensors = [part for part in (dense, *parts.rotary, *norms) if part is not None]
    if any(part.dtype is not dtype or not part.is_contiguous() or part.device.type != "cpu" for part in tensors):
        return False
    return parts.lm_head.out_features % LANES == 0


def stored_embedding(parts: DraftParts) -> tuple[Tensor | None, PackedLinear | None]:
    """Return the embedding as a dense tensor or in blocks."""
    embedding = parts.embedding
    return (embedding, None) if isinstance(embedding, Tensor) else (None, embedding)


def padded(tensor: Tensor, *pads: int) -> Tensor:
    return F.pad(tensor, pads) if any(pads) else tensor


def addresses_of(matrix: Tensor, names: Sequence[str]) -> dict[str, int]:
    """Return the addresses of the first rows of a matrix, by name."""
    first, step = matrix.data_ptr(), matrix.stride(0) * matrix.element_size()
    return {name: first + step * row for row, name in enumerate(names)}


def layout(native: NativeDraft, rows: int, most: int, hidden: int, size: int) -> dict[str, int]:
    """Return the bytes of each buffer that C computes in: `rows` run through the layers, `most` through the LM head.

    `size`: bytes of a number of the states, of which a row has `hidden`.
    """
    parts, joined = native.parts, native.joined
    return {
        "tokens": rows * hidden * size * (1 if joined is None else 2),
        "turned": 2 * rows * native.parts.rotary[0].shape[1] * size,
        "normed": most * hidden * size,
        "logits": most * parts.lm_head.out_features * parts.lm_head.out_dtype.itemsize,
        "scratch": 4 * max(native.lm_head.room(most), 0 if joined is None else joined.room(rows)),
        "hidden": 0 if parts.decoder.final_norm is None else rows * hidden * size,
    }


class SharedArrays(NamedTuple):
    """What Python and C both read or write of a draft of at most `rows` rows, `most` of them after the first level."""

    numbers: Tensor  # int64 [5, rows]: NUMBERS
    state: Tensor  # [rows, H]
    seeds: Tensor  # int64 [2, most]: low and high halves
    temperature: Tensor  # fp32 [most]
    columns: Tensor  # int64 [most * count]: each row's best tokens, as columns of the draft vocabulary
    keys: Tensor  # fp32 [most * count]: what they were ranked by
    masses: Tensor  # fp32 [most]: as in choose_best

    def addresses(self) -> dict[str, int]:
        """Return the values of FIELDS."""
        pairs = (addresses_of(getattr(self, name), rows).items() for name, rows in FIELDS.items())
        return dict(chain.from_iterable(pairs))


def shared_arrays(
    unread: Tensor, state: Tensor, parameters: ChoiceParameters | None, *, chains: int, most: int, count: int
) -> SharedArrays:
    """Return arrays whose first rows are copies of NUMBERS `unread` `[5, R]`, `state` and what C chains sample with."""
    missing, unused = max(most - len(state), 0), most - chains
    if parameters is None:
        seeds, temperature = torch.zeros(2, most, dtype=torch.int64), torch.zeros(most)
    else:
        assert not parameters.restricts
        seeds = padded(torch.stack([parameters.seed_low, parameters.seed_high]), 0, unused)
        temperature = padded(parameters.temperature.clone(), 0, unused)
    numbers, copied_state = padded(unread, 0, missing), state.clone(memory_format=torch.contiguous_format)
    ranked = torch.empty(most * count, dtype=torch.int64), torch.empty(most * count), torch.empty(most)
    return SharedArrays(numbers, padded(copied_state, 0, 0, 0, missing), seeds, temperature, *ranked)


class NativeDraft:
    """A head of `runs_in_c` parts, whose tensors must not move in memory."""

    def __init__(self, parts: DraftParts) -> None:
        lib = library()
        assert lib is not None
        self.draft, self.read, self.branch, self.parts = lib.draft, lib.draft_read, lib.draft_branch, parts
        self.ids, self._lm_head = parts.draft_ids.contiguous(), linear_arguments(parts.lm_head)
        self._fused = None if parts.joined is None else linear_arguments(parts.joined)
        assert parts.lm_head.native is not None, "runs_in_c() has asked"
        self.lm_head, self.joined = parts.lm_head.native, parts.joined and parts.joined.native
        dense, blocks = stored_embedding(parts)
        self._blocks = None if blocks is None else linear_arguments(blocks)
        cos, sin = parts.rotary
        self.arguments = DraftArguments(
            joined=None if self._fused is None else ctypes.addressof(self._fused),
            lm_head=ctypes.addressof(self._lm_head),
            embedding=address(dense),
            blocks=None if self._blocks is None else ctypes.addressof(self._blocks),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            norm=address(parts.norm),
            token_norm=address(parts.token_norm),
            state_norm=address(parts.state_norm),
            state_first=parts.state_first,
            zero_first=parts.zero_first,
            draft_ids=self.ids.data_ptr(),
        )


class NativeLevels:
    """A draft in progress for C requests, whose first level also prefills the unread rows.

    Owns all of the draft's memory that C reads and writes.
    """

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
        *,
        width: int = 1,
        count: int = 1,
        places: int = 0,
    ) -> None:
        """ids, positions `[R]`, state `[R, H]` and `rows`: the unread rows, at least one per request.

        caches: of the head's layers. parameters `[C]` without top-k, top-p and min-p. `levels`: upper bound on the
        levels drafted; the rotary table must cover that many more positions. Per request at most `width` rows continue
        from a level, each with its `count` best tokens; keys take max(`levels`, `places`) places after the root's.
        """
        chains, parts, hidden = len(rows.counts), native.parts, state.shape[1]
        self._native, self._chains, self._rows = native, chains, len(state)
        most = width * chains  # rows of a level after the first
        max_rows = max(len(state), most)
        unread = torch.stack([ids, positions, rows.committed, rows.offset, rows.request])
        self._arrays = shared_arrays(unread, state, parameters, chains=chains, most=most, count=count)
        # From the first level's rows, each request's last one continues.
        self._last_rows = torch.tensor([end - 1 for end in accumulate(rows.counts)])
        self._ends = self._arrays.numbers[:, self._last_rows]
        shared, ends = self._arrays.addresses(), addresses_of(self._ends, NUMBERS)
        self._table = rows.table
        self._buffer, addresses = allocate_aligned(layout(native, max_rows, most, hidden, state.element_size()))
        self._attention = AttentionArguments(
            table=self._table.data_ptr(),
            heads=parts.num_heads,
            kv_heads=parts.num_kv_heads,
            dim=parts.decoder.head_dim,
            pages=self._table.stride(0),
            page_size=rows.page_size,
            longest=-(-(rows.longest + max(levels, places)) // LANES) * LANES,
            first=rows.first,
            **{name: shared[name] for name in ADDRESSED},
        )
        self._kept_attention = copied(self._attention, {name: ends[name] for name in ADDRESSED} | {"rows": chains})
        self._decoder, self._decoder_keepalive = parts.decoder.begin(max_rows, self._attention, caches, {})
        self._decoder.kept, self._decoder.keep = ctypes.addressof(self._kept_attention), self._last_rows.data_ptr()
        self._decoder.x, normed = self._arrays.state.data_ptr(), addresses.pop("hidden")
        self._decoder.hidden = self._decoder.x if parts.decoder.final_norm is None else normed
        self._arguments = copied(native.arguments, addresses | shared | {"decoder": ctypes.addressof(self._decoder)})

    def read(self) -> None:
        """Prefill the unread rows without drafting: compute only what later rows need of them."""
        self._kept_attention.rows = 0
        self._native.read(self._prepare(0))

    def _first(self, count: int) -> None:
        """Prefill the unread rows and find the `count` best tokens of each request's last row; 0: only its choice."""
        self._native.draft(self._prepare(count))
        self._rows, self._decoder.kept = self._chains, None
        self._decoder.reach += self._native.parts.from_slot

    def _prepare(self, count: int) -> int:
        """Set the arguments for the current number of rows and return their address."""
        a, native = self._arguments, self._native
        a.chains, a.count, a.rows = self._chains, count, self._rows
        self._attention.rows = self._rows
        a.threads = native.lm_head.threads(self._chains)
        a.joined_threads = native.joined.threads(self._rows) if native.joined else 1
        self._decoder.threads = native.parts.decoder.threads(self._rows)
        return ctypes.addressof(a)


class NativeChains(NativeLevels):
    """A draft of C chains."""

    def draft(self, *, return_log_probs: bool) -> tuple[list[int], list[float] | None]:
        """Draft one more token of each chain (target ids); with `return_log_probs` also return its log-probability."""
        self._first(1 if return_log_probs else 0)
        tokens = self._arrays.numbers[0, : self._chains].tolist()
        if not return_log_probs:
            return tokens, None
        return tokens, [-math.log(mass) for mass in self._arrays.masses[: self._chains].tolist()]

    def keep(self, indices: Sequence[int]) -> None:
        """Continue only the chains at `indices`, which are ascending."""
        index, count, arrays = torch.tensor(indices), len(indices), self._arrays
        for tensor in (arrays.numbers, arrays.seeds):
            tensor[:, :count] = tensor[:, index]
        for tensor in (arrays.state, arrays.temperature):
            tensor[:count] = tensor[index]
        self._rows = self._chains = count


class NativeTrees(NativeLevels):
    """A draft of C trees, grown as in infer/speculation/proposers/draft_loops/tree_shapes.py.

    At most `width` nodes of a level are run through the head, `places` in total.
    """

    def children(self, level: int, fan_out: int) -> tuple[Tensor, Tensor]:
        """Return the best children of the M nodes per request that were run last (at level 1, the root).

        They are ranked with the target's noise: target ids and log-probabilities `[C, M, R]`, R being `fan_out` or the
        size of the draft vocabulary if that is smaller.
        """
        arrays, count = self._arrays, min(fan_out, self._native.parts.lm_head.out_features)
        if level == 1:
            self._roots, self._used = self._chains, 0
            self._first(count)
            self._root_numbers = arrays.numbers[1:, : self._roots].clone()
            self._states, self._tree_mask = arrays.state, None
            self._root_sampling = arrays.seeds[:, : self._roots].clone(), arrays.temperature[: self._roots].clone()
        else:
            self._run(count)
        nodes = self._chains
        shape = self._roots, nodes // self._roots, count
        keys = arrays.keys[: nodes * count].view(shape)
        values = keys - keys[..., :1] - arrays.masses[:nodes].log().view(*shape[:2], 1)
        return self._native.ids[arrays.columns[: nodes * count]].view(shape), values

    def run(self, level: int, parent: Tensor, token: Tensor) -> None:
        """Set the nodes `[C, M']` to grow from, which `children` runs; `parent` is each one's index among the M."""
        self._next = level, parent.contiguous(), token.contiguous()

    def _run(self, count: int) -> None:
        (level, parent, tokens), arrays = self._next, self._arrays
        (roots, width), before = parent.shape, self._chains // self._roots
        if width != before:
            for tensor, root_values in zip((arrays.seeds, arrays.temperature), self._root_sampling, strict=True):
                tensor[..., : roots * width] = root_values.repeat_interleave(width, dim=-1)
        states, tree_mask, self._states = self._states, self._tree_mask, torch.empty_like(arrays.state)
        self._tree_mask = torch.empty(roots, width, dtype=torch.int64)
        self._rows = self._chains = roots * width
        self._decoder.x, self._attention.words = self._states.data_ptr(), self._tree_mask.data_ptr()
        self._decoder.reach = level if self._native.parts.from_slot else 0
        if self._native.parts.decoder.final_norm is None:
            self._decoder.hidden = self._decoder.x
        positions, committed, _, request = (tensor.data_ptr() for tensor in self._root_numbers)
        branch = Branch(
            draft=self._prepare(count),
            parent=parent.data_ptr(),
            tokens=tokens.data_ptr(),
            states=states.data_ptr(),
            words=address(tree_mask),
            own_words=self._tree_mask.data_ptr(),
            positions=positions,
            committed=committed,
            request=request,
            roots=roots,
            before=before,
            width=width,
            used=self._used,
            level=level - 1,
        )
        self._native.branch(ctypes.addressof(branch))
        self._used += width
