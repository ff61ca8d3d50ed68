"""The draft vocabulary: the target's tokens that an EAGLE-3 head predicts, as the two maps that its checkpoint stores.

`d2t` is an OFFSET: target id = draft id + d2t[draft id]. Draft ids ascend with target ids, so ties in a top-k or an
argmax fall the same way in either vocabulary. Knows nothing about heads or data.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def build_draft_vocab(counts: Tensor, size: int, forced_ids: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
    """`counts [V]` of the tokens to predict -> `d2t` int64 `[Vd]`, `t2d` bool `[V]`, with Vd = min(size, V).

    Takes `forced_ids` (end of text, chat markers: rare, but a draft that cannot say them always overshoots), then the
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


def target_ids(d2t: Tensor) -> Tensor:
    """The target id of every draft id, ascending."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def coverage(ids: Tensor, draft_vocabulary: Tensor) -> float:
    """Share of the tokens `ids` that are among the target ids `draft_vocabulary` `[Vd]`."""
    return torch.isin(ids, draft_vocabulary.to(ids.device)).double().mean().item() if ids.numel() else float("nan")
