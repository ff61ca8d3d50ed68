"""The draft vocabulary: the target's tokens that an EAGLE-3 head predicts, as the two maps that its checkpoint stores.

`d2t` is an OFFSET: target id = draft id + d2t[draft id]. Draft ids ascend with target ids, so ties in a top-k or an
argmax are broken the same way in either vocabulary. Files of other projects may hold only one map, from which the other
follows, or target ids in place of offsets. Independent of heads and data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def build_draft_vocab(counts: Tensor, size: int, forced_ids: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
    """Build `d2t` int64 `[Vd]` and `t2d` bool `[V]`, Vd = min(size, V), from `counts [V]` of the tokens to predict.

    Takes `forced_ids` (end of text, chat markers: rare, but a head that cannot draft them always overshoots), then the
    most frequent ids, then, where fewer were seen, the lowest unused ones. Raises ValueError when `forced_ids` do not
    fit.
    """
    vocab_size = counts.numel()
    size = min(size, vocab_size)
    forced = torch.tensor(sorted(set(forced_ids)), dtype=torch.int64)
    if forced.numel() and not (int(forced[0]) >= 0 and int(forced[-1]) < vocab_size):
        raise ValueError(f"special token ids {forced.tolist()}: outside the target's vocabulary of {vocab_size}")
    if forced.numel() > size:
        raise ValueError(
            f"head.draft_vocab_size={size}: cannot hold the {forced.numel()} special tokens, which are always kept; "
            f"choose at least {forced.numel()}"
        )
    rank = counts.to(torch.int64, copy=True).cpu()
    rank[forced] = torch.iinfo(torch.int64).max
    used = rank.sort(descending=True, stable=True).indices[:size].sort().values  # stable: ties go to the lowest id
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[used] = True
    return used - torch.arange(size), t2d


class Maps(NamedTuple):
    """Both maps; `remarks` tells, by the name of a map, how it was derived or converted."""

    d2t: Tensor
    t2d: Tensor
    remarks: dict[str, str]


def complete_maps(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int) -> Maps:
    """Return both maps, from one or two: `d2t` integers `[Vd]`, offsets or target ids, and `t2d` bool `[V]`.

    If `t2d` is present it decides which of the two `d2t` holds. Without it `d2t` holds offsets, as its format
    prescribes, unless only the reading as target ids yields distinct tokens of the vocabulary. With `t2d` alone, draft
    ids ascend with target ids. Raises ValueError naming the maps that contradict each other, or the one that is
    invalid.
    """
    assert d2t is not None or t2d is not None
    if d2t is None:
        assert t2d is not None
        used = t2d.nonzero()[:, 0]
        return Maps(used - torch.arange(len(used)), t2d, {"d2t": "follows from t2d"})
    draft_ids, values = torch.arange(d2t.numel()), d2t.long()
    candidates = [(ids, _token_mask(ids, vocab_size)) for ids in (draft_ids + values, values)]
    matches = [(ids, mask) for ids, mask in candidates if mask is not None and (t2d is None or torch.equal(mask, t2d))]
    if not matches and t2d is not None:
        raise ValueError(
            "d2t and t2d do not describe one vocabulary: neither as offsets nor as target ids does d2t name the "
            f"{int(t2d.sum())} tokens of t2d"
        )
    if not matches:
        raise ValueError(
            f"d2t: neither as offsets nor as target ids does it name {len(values)} distinct tokens of the target's "
            f"{vocab_size}"
        )
    ids, mask = matches[0]
    remarks = {} if torch.equal(ids - draft_ids, values) else {"d2t": "target ids in the source, made offsets"}
    return Maps(ids - draft_ids, mask, remarks if t2d is not None else remarks | {"t2d": "follows from d2t"})


def _token_mask(ids: Tensor, vocab_size: int) -> Tensor | None:
    """Return bool `[V]`, true at the tokens `ids`; None unless these are distinct tokens of the vocabulary."""
    if not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return None
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return mask if int(mask.sum()) == ids.numel() else None


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target id of every draft id, ascending."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def coverage(ids: Tensor, draft_vocabulary: Tensor) -> float:
    """Return the share of the tokens `ids` that are among the target ids `draft_vocabulary` `[Vd]`."""
    return torch.isin(ids, draft_vocabulary.to(ids.device)).double().mean().item() if ids.numel() else float("nan")
