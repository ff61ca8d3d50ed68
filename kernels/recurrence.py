"""Recurrent layers: a causal depthwise convolution and a linear recurrence, each with a state per request.

Contract of both: a row follows its parent, which is another row of its request or, for the first ones, the request's
state. So the rows of a prompt, of one token, of a chain and of a draft tree are one case, and a row's bits depend on
its ancestors alone. The state of a request whose rows are `advance`d becomes that of its last row; all other states
stay, and are brought up to date by the same functions over the rows of the accepted path (`RecurrentRows.along`).

Order of evaluation, everywhere: token by token from the state, which is fp32 and is kept as it is stored. Sums over the
key's numbers run in ascending order, taps from the oldest. The convolution's inputs are stored in the dtype of x.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.copies import upload, upload_lists
from kernels.elementwise import uniform

L2_EPS = 1e-6  # of queries and keys of a gated delta net


@dataclass
class RecurrentRows:
    """R rows of B requests, request by request; a row's parent precedes it."""

    counts: tuple[int, ...]  # rows of each request, on the host
    slots: Tensor | None  # [B] int64, of the requests' states; None: they begin with zeros, and none is kept
    advance: Tensor  # [B] bool: the state of the request's last row replaces the one in its slot; a chain then
    parents: Tensor | None = None  # [R] int32: the parent among its request's rows, -1: the state. None: chains

    @classmethod
    def chains(cls, counts: Sequence[int], slots: Sequence[int] | None, device: torch.device) -> RecurrentRows:
        """Make chains that are all certain: prompts, single tokens, accepted paths."""
        at = None if slots is None else upload(list(slots), device)
        return cls(tuple(counts), at, torch.full((len(counts),), slots is not None, device=device))

    @cached_property
    def owner(self) -> Tensor:
        """int64 `[R]`: which request each row belongs to."""
        device = self.advance.device
        if len(set(self.counts)) == 1:
            return torch.arange(len(self.counts), device=device).repeat_interleave(self.counts[0])
        return upload([b for b, count in enumerate(self.counts) for _ in range(count)], device)

    @cached_property
    def first(self) -> Tensor:
        """int64 `[B + 1]`: where each request's rows begin."""
        ends = torch.tensor((0, *self.counts)).cumsum(0)
        return upload(ends.tolist(), self.advance.device)

    @cached_property
    def above(self) -> Tensor:
        """int64 `[R]`: the parent's row in the call, or -1 for the newest column of the request's state."""
        first = self.first[self.owner]
        row = torch.arange(len(first), device=first.device)
        parents = row - first - 1 if self.parents is None else self.parents.long()
        return torch.where(parents >= 0, first + parents, -1)

    def ancestors(self, count: int) -> Tensor:
        """Return the `count` ancestors of each row, oldest first: `[R, count]` int64.

        A row of the call, or below 0 a column of the state counted from its end.
        """
        nodes, newest_first = self.above, list[Tensor]()
        for _ in range(count):
            newest_first.append(nodes)
            nodes = torch.where(nodes >= 0, self.above[nodes.clamp(min=0)], nodes - 1)
        return torch.stack(newest_first[::-1], dim=1)

    def along(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, RecurrentRows]:
        """Return the rows `paths[b]`, node by node from the root, of each request, and how they advance its state.

        Requests of an empty path are left out.
        """
        assert self.slots is not None
        firsts = [0, *torch.tensor(self.counts).cumsum(0).tolist()]
        taken = [(b, path) for b, path in enumerate(paths) if len(path)]
        rows = [firsts[b] + node for b, path in taken for node in path]
        index, requests = upload_lists((rows, [b for b, _ in taken]), self.advance.device)
        counts = tuple(len(path) for _, path in taken)
        return index, RecurrentRows(counts, self.slots[requests], torch.ones_like(requests, dtype=torch.bool))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, rows: RecurrentRows, *, silu: bool
) -> Tensor:
    """Convolve each row's channels with its ancestors': `[R, C]`, in the dtype of x `[R, C]`.

    weight `[C, K]`, oldest tap first; windows `[S, K - 1, C]` in the dtype of x: the inputs of the last committed rows,
    oldest first, which are zeros before a text begins. Sums in fp32, rounded once, after SiLU if there is one.
    """
    taps = weight.shape[1]
    ancestors = rows.ancestors(taps - 1)
    state = None if windows is None or rows.slots is None else windows[rows.slots]  # [B, K - 1, C]
    out = torch.zeros((), device=x.device) if bias is None else bias.float()
    for tap in range(taps - 1):
        index = ancestors[:, tap]
        past = x[index.clamp(min=0)]
        outside = torch.zeros_like(past) if state is None else state[rows.owner, (index + taps - 1).clamp(max=taps - 2)]
        out = out + weight[:, tap].float() * torch.where((index >= 0)[:, None], past, outside).float()
    out = out + weight[:, -1].float() * x.float()
    if windows is not None:
        advance(x, windows, rows)
    return (uniform(F.silu, out) if silu else out).to(x.dtype)


def advance(x: Tensor, windows: Tensor, rows: RecurrentRows) -> None:
    """Do to the windows what `convolve` does, for rows x `[R, C]` whose outputs are known."""
    assert rows.slots is not None
    columns = windows.shape[1]
    for b, (begin, end) in enumerate(itertools.pairwise(rows.first.tolist())):
        if bool(rows.advance[b]) and end > begin:
            slot = rows.slots[b]
            windows[slot] = torch.cat([windows[slot], x[begin:end]])[-columns:]


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, states: Tensor | None, rows: RecurrentRows, *,
    delta: bool,
) -> Tensor:  # fmt: skip
    """Run a linear recurrence over the rows, per head: S <- decay S + k u^T, out = S^T q, `[R, H, V]` in fp32.

    u = gain v (Mamba-2, arXiv 2405.21060), or with `delta` u = gain (v - S^T k), of S after the decay, where q and k
    are divided by their norms and q by the root of K (gated delta net, arXiv 2412.06464). q, k `[R, G, K]`: head h has
    those of group h // (H / G); v `[R, H, V]`; decay, gain `[R, H]` fp32; states `[S, H, K, V]` fp32.
    """
    heads, groups = v.shape[1], k.shape[1]
    q, k, v = q.float(), k.float(), v.float()
    if delta:
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k = (x.repeat_interleave(heads // groups, dim=1) for x in (q, k))
    zero = torch.zeros(heads, k.shape[-1], v.shape[-1], device=v.device)
    begins, slots = rows.first.tolist(), None if rows.slots is None else rows.slots.tolist()
    above, out, nodes = rows.above.tolist(), list[Tensor](), dict[int, Tensor]()
    for b, (begin, end) in enumerate(itertools.pairwise(begins)):
        base = zero if states is None or slots is None else states[slots[b]].clone()
        nodes.clear()
        for row in range(begin, end):
            state = (nodes[above[row]] if above[row] >= 0 else base) * decay[row, :, None, None]
            u = v[row] - (state * k[row, :, :, None]).sum(1) if delta else v[row]
            state = state + k[row, :, :, None] * (gain[row, :, None] * u)[:, None, :]
            out.append((state * q[row, :, :, None]).sum(1))
            nodes[row] = state
            if rows.parents is None:
                nodes.pop(row - 1, None)
        if states is not None and slots is not None and bool(rows.advance[b]) and end > begin:
            states[slots[b]] = nodes[end - 1]
    return torch.stack(out)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


softplus = partial(uniform, partial(F.softplus, beta=1.0, threshold=20.0))
