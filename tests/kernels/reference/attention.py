"""Reference of paged attention, one row at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    committed: list[int],
    counts: list[int],
    *,
    page_size: int,
    scale: float,
    ancestors: Tensor | None = None,
    first: int = 0,
    window: int | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """q `[R, nh, D]`, cache `[2, nkv, slots, D]`, block_table `[B, P]` -> `[R, nh * D]` float64.

    With `value_dim` the cache is `[1, nkv, slots, D]`: values are the first numbers of keys.

    Row j of a request sees the committed positions and, of the step's rows, those in its tree mask `ancestors[b, j]`
    (without one, the rows up to itself). No row sees places before `first` or more than its last `window` keys.
    `sinks` `[nh]` are scores of a key of each head whose value is zero.
    """
    group = q.shape[1] // cache.shape[1]
    out, row = [], 0
    for b, (start, count) in enumerate(zip(committed, counts, strict=True)):
        for node in range(count):
            if ancestors is None:
                visible = list(range(node + 1))
            else:
                visible = [j for j in range(count) if int(ancestors[b, node]) >> j & 1]
            positions = torch.tensor(list(range(first, start)) + [start + j for j in visible])
            positions = positions if window is None else positions[-window:]
            slots = block_table[b][positions // page_size] * page_size + positions % page_size
            stored = cache[:, :, slots].double().repeat_interleave(group, dim=1)
            keys, values = stored[0], stored[-1, ..., :value_dim]  # [nh, L, D] each
            scores = torch.einsum("hd,hld->hl", q[row].double(), keys) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
            weights = scores.softmax(-1)[:, : len(positions)]
            out.append(torch.einsum("hl,hld->hd", weights, values).flatten())
            row += 1
    return torch.stack(out)
