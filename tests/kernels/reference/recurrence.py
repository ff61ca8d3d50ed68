"""References of recurrent layers: rows of one request in float64, each computed along its path from the state.

`parents[i]` is the row that row i follows, -1 the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, parents: Sequence[int], *, silu: bool
) -> Tensor:
    """x `[R, C]`, weight `[C, K]`, bias `[C]`, window `[K - 1, C]`, all oldest first -> `[R, C]` float64."""
    taps, out = weight.shape[1], list[Tensor]()
    for row in range(len(x)):
        inputs = torch.cat([window, x[path(parents, row)]]).double()
        columns = inputs[len(inputs) - taps :]
        sums = torch.einsum("kc,ck->c", columns, weight.double())
        sums = sums if bias is None else sums + bias.double()
        out.append(sums * sums.sigmoid() if silu else sums)
    return torch.stack(out)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """arXiv 2412.06464: q, k `[R, G, K]`, v `[R, H, V]`, decay, beta `[R, H]`, state `[H, K, V]`.

    Returns outputs `[R, H, V]` and each row's state `[R, H, K, V]` in float64.
    """
    per_group = v.shape[1] // k.shape[1]
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out, states = list[Tensor](), list[Tensor]()
    for row in range(len(v)):
        s = state.double().clone()
        for token in path(parents, row):
            for head in range(v.shape[1]):
                key = k[token, head // per_group]
                transition = torch.eye(len(key)).double() - beta[token, head].double() * torch.outer(key, key)
                s[head] = decay[token, head].double() * transition @ s[head]
                s[head] += beta[token, head].double() * torch.outer(key, v[token, head].double())
        queries = q[row].repeat_interleave(per_group, dim=0) / k.shape[-1] ** 0.5
        out.append(torch.einsum("hk,hkv->hv", queries, s))
        states.append(s)
    return torch.stack(out), torch.stack(states)


def mamba2(
    c: Tensor, b: Tensor, x: Tensor, decay: Tensor, dt: Tensor, state: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """arXiv 2405.21060: c, b `[R, G, N]`, x `[R, H, P]`, decay, dt `[R, H]`, state `[H, N, P]`; returns as above.

    By the quadratic form: a token reaches a row with the product of the decays between them.
    """
    per_group = x.shape[1] // b.shape[1]
    c, b = (y.double().repeat_interleave(per_group, dim=1) for y in (c, b))
    inputs = torch.einsum("rhn,rh,rhp->rhnp", b, dt.double(), x.double())
    out, states = list[Tensor](), list[Tensor]()
    for row in range(len(x)):
        tokens = path(parents, row)
        reach = decay[tokens].double().flip(0).cumprod(0).flip(0)  # [L, H] of what came before each token
        weights = torch.cat([reach, torch.ones_like(reach[:1])])
        s = torch.einsum("lh,lhnp->hnp", weights, torch.cat([state.double()[None], inputs[tokens]]))
        out.append(torch.einsum("hn,hnp->hp", c[row], s))
        states.append(s)
    return torch.stack(out), torch.stack(states)


def path(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from the state to this one."""
    return [*path(parents, parents[row]), row] if row >= 0 else []
