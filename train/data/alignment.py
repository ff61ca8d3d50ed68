"""Shifts and masks that define what a head reads and predicts at every slot, as pure functions (docs/design.md).

Slot i holds the head's input after the target has just emitted token t[i+1]: the pair (t[i+1], feature f[i]) at
rotary position i. Its draft approximates p[i+1], the target's distribution over t[i+2]. At training-time-test step k
the slot has drafted k further tokens: it reads t[i+1+k] at position i+k and approximates p[i+1+k].

Several documents may be packed end to end into one row. The assistant mask of each one's first token is then False, so
that no served slot, no step and no teacher row crosses from one document into the next.

All heads are aligned in this way; a step is what they call a head or a depth. Medusa's head k reads f[i] alone, the MLP
speculator's head k the state of head k - 1 and t[i+1+k], P-EAGLE's depth k a mask slot at position i+k; each of them
drafts t[i+2+k]. Independent of models and losses; every function takes `[..., T]`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def shift_left(x: Tensor, by: int, fill: int | bool = 0) -> Tensor:
    """Return `out[..., i] = x[..., i + by]`, with `fill` past the end."""
    length = x.shape[-1]
    out = torch.full_like(x, fill)
    if by < length:
        out[..., : length - by] = x[..., by:]
    return out


def draft_tokens(ids: Tensor, step: int) -> Tensor:
    """Return the token that slot i reads at this step, teacher-forced: t[i + 1 + step]; 0 past the end, not served."""
    return shift_left(ids, 1 + step)


def positions(ids: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return each slot's position in its document, whose first slot is `starts`; None: a row is one document."""
    slots = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return slots if starts is None else slots - starts


def draft_positions(positions: Tensor, step: int) -> Tensor:
    """Return the rotary position of every slot at this step: its position + step.

    Clamped to the highest position, which only slots without a target exceed, so that none leaves the rotary table.
    """
    return torch.minimum(positions + step, positions.max())


def predicted_tokens(ids: Tensor, step: int) -> Tensor:
    """Return the token that slot i's draft must equal to be accepted at this step: t[i + 2 + step]."""
    return shift_left(ids, 2 + step)


def served(assistant: Tensor) -> Tensor:
    """Return the mask of served slots, those from which the engine drafts: `assistant[i+1] & assistant[i+2]`.

    A draft starts from a token that the target emitted, the first of a response included, and is useful only if another
    token follows: the slot of the last token (end of text) is excluded. The last two slots have no target.
    """
    return shift_left(assistant, 1, False) & shift_left(assistant, 2, False)


def step_masks(assistant: Tensor, steps: int) -> Tensor:
    """Return masks `[steps, ..., T]`: slot i counts at step k if slots i .. i+k are served: no draft crosses a turn."""
    start = served(assistant)
    masks = [start]
    for step in range(1, steps):
        masks.append(masks[-1] & shift_left(start, step, False))
    return torch.stack(masks)


def served_slots(start: Tensor) -> Tensor:
    """Return each row's served slots, `[B, M]`, from `start` `[B, T]` (see `served`); M is the maximum over rows.

    Ascending. Rows with fewer served slots are padded with other slots of the row; M is at least 1.
    """
    max_slots = max(1, int(start.sum(-1).max()))
    return (~start).long().argsort(dim=-1, stable=True)[:, :max_slots]


def at(x: Tensor, slots: Tensor) -> Tensor:
    """Gather x `[B, T, ...]` at `slots`, `[M]` for all rows or `[B, M]` -> `[B, M, ...]`."""
    if slots.ndim == 1:
        return x[:, slots]
    return x.gather(1, slots.view(*slots.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def sample_sizes(slots: int, shares: Iterable[float]) -> list[int]:
    """Return on how many of `slots` each depth is trained, given the depths' shares: one at least, if there is any."""
    return [min(slots, max(1, round(slots * share))) for share in shares]


def teacher_rows(assistant: Tensor) -> Tensor:
    """Return the mask of positions whose target distribution some slot approximates: j with slot j-1 served.

    The teacher of slot i at step k is position i+1+k, so all steps share these rows.
    """
    rows = torch.zeros_like(assistant)
    rows[..., 1:] = served(assistant)[..., :-1]
    return rows
