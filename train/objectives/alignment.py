"""What a head reads and predicts at every slot: shifts and masks, as pure functions (DESIGN section 6).

Slot i holds what the engine holds when the target has just emitted token t[i+1]: the pair (t[i+1], feature f[i]) at
rotary position i. Its draft approximates p[i+1], the target's distribution over t[i+2]. At training-time-test step k
the slot has drafted k tokens more: it reads t[i+1+k] at position i+k and approximates p[i+1+k].

Several documents may lie end to end in one row. The first token of each is then marked as nobody's, so that no served
slot, no step and no teacher reaches from one into the next.

Every head is aligned so, its step being what it calls a head or a depth: Medusa's head k reads f[i] alone, the MLP
speculator's head k the state of head k - 1 and t[i+1+k], P-EAGLE's depth k a mask slot at position i+k; each of them
drafts t[i+2+k]. Knows nothing about models or losses; every function takes `[..., T]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift_left(x: Tensor, by: int, fill: int | bool = 0) -> Tensor:
    """`out[..., i] = x[..., i + by]`, `fill` past the end."""
    length = x.shape[-1]
    out = torch.full_like(x, fill)
    if by < length:
        out[..., : length - by] = x[..., by:]
    return out


def draft_tokens(ids: Tensor, step: int) -> Tensor:
    """The token that slot i reads at this step: t[i + 1 + step], teacher-forced; 0 past the end, never served."""
    return shift_left(ids, 1 + step)


def positions(ids: Tensor, starts: Tensor | None = None) -> Tensor:
    """The place of every slot in its document, whose first slot is `starts`; None: a row is one document."""
    slots = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return slots if starts is None else slots - starts


def draft_positions(positions: Tensor, step: int) -> Tensor:
    """The rotary position of every slot at this step: its own + step.

    Held at the highest, which only slots without a target go beyond, so that no position leaves the rotary table.
    """
    return torch.minimum(positions + step, positions.max())


def predicted_tokens(ids: Tensor, step: int) -> Tensor:
    """The token that slot i's draft must equal to be accepted at this step: t[i + 2 + step]."""
    return shift_left(ids, 2 + step)


def served(assistant: Tensor) -> Tensor:
    """Slots from which the engine drafts: `assistant[i+1] & assistant[i+2]`.

    A draft starts from a token that the target itself emitted, the first of a response included, and is of use only
    while another follows: the slot of the last token (end of text) is out. The last two slots have no target.
    """
    return shift_left(assistant, 1, False) & shift_left(assistant, 2, False)


def step_masks(assistant: Tensor, steps: int) -> Tensor:
    """`[steps, ..., T]`: slot i counts at step k when slots i .. i+k are all served: no draft crosses a turn."""
    start = served(assistant)
    masks = [start]
    for step in range(1, steps):
        masks.append(masks[-1] & shift_left(start, step, False))
    return torch.stack(masks)


def served_slots(start: Tensor) -> Tensor:
    """start `[B, T]`, as `served` -> `[B, M]`: each row's served slots, ascending, M the most of any row.

    Rows with fewer are filled with others of theirs; every answer has at least one.
    """
    most = max(1, int(start.sum(-1).max()))
    return (~start).long().argsort(dim=-1, stable=True)[:, :most]


def at(x: Tensor, slots: Tensor) -> Tensor:
    """x `[B, T, ...]` at `slots`, `[M]` for all rows or `[B, M]` -> `[B, M, ...]`."""
    if slots.ndim == 1:
        return x[:, slots]
    return x.gather(1, slots.view(*slots.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def sample_sizes(slots: int, steps: int, ratio: float, least: float) -> list[int]:
    """How many of `slots` each depth of a parallel head is trained on: all at 0, then max(ratio ** d, least) of them.

    Every depth's are among those of the depth before (arXiv 2602.01469); at least one, if there is any.
    """
    return [min(slots, max(1, round(slots * max(ratio**depth, least)))) for depth in range(steps)]


def teacher_rows(assistant: Tensor) -> Tensor:
    """Positions whose target distribution some slot approximates: j with slot j-1 served.

    Slot i at step k is taught by position i+1+k, so all steps share these rows.
    """
    rows = torch.zeros_like(assistant)
    rows[..., 1:] = served(assistant)[..., :-1]
    return rows
