"""The attention seam: what a layer calls, and the dense implementations that training plugs in.

`attention(layer, q, k, v)` receives rotated queries and keys of the current tokens and answers `[..., heads * D]`.
Where older keys come from (nowhere, earlier training-time-test steps, a paged pool) is the implementation's business;
the paged one lives with the engine (infer/kv_cache.py, kernels/attention.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rotary import QKNorm


class Attention(Protocol):
    """Contract: q `[..., nh, D]`, k and v `[..., nkv, D]` with nh a multiple of nkv; returns `[..., nh * D]`.

    With `window` a row at position p sees positions above p - window only.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor: ...


class Project(Protocol):
    """`attention.project`, of those attentions that norm, rotate and keep keys and values in one go.

    qkv `[R, nh + 2 nkv, D]` as projected, cos and sin `[R, 1, D]`; returns `[R, nh * D]`.
    """

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        *,
        window: int | None = None,
    ) -> Tensor: ...


def project_of(attention: Attention) -> Project | None:
    """None where projections must be normed and rotated first, which is what most attentions and all training want."""
    return getattr(attention, "project", None)


def no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """What a head without attention is given."""
    raise AssertionError("this head attends to nothing")


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """`[B, nkv, T, D]` -> `[B, nkv * groups, T, D]`, each KV head repeated for its query heads."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def visible(starts: Tensor, slots: Tensor | None = None) -> Tensor:
    """bool `[B, 1, T, T]`: what each slot of packed documents sees: itself and what is before it in its own.

    starts `[B, T]`: the slot at which a slot's document begins. With `slots` `[M]` or `[B, M]` the rows of these alone.
    """
    columns = torch.arange(starts.shape[1], device=starts.device)
    slots = (columns if slots is None else slots).expand(len(starts), -1)
    return ((columns >= starts.gather(1, slots)[..., None]) & (columns <= slots[..., None])).unsqueeze(1)


class CausalAttention:
    """Every slot of `[B, T]` attends to itself and to all slots before it, of its own document. Stateless.

    starts `[B, T]`: where that begins; None: each row is one document.
    """

    def __init__(self, starts: Tensor | None = None) -> None:
        self.starts = starts
        self._seen = None if starts is None else visible(starts)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        groups, T = q.shape[1] // k.shape[1], q.shape[2]
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        seen = self._seen
        if window is not None and window < T:
            near = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
            seen = near if seen is None else seen & near
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return out.transpose(1, 2).flatten(2)


class TrainingTimeTestAttention:
    """EAGLE-3's training-time test (arXiv 2503.01840): the keys that a chain draft would find in its cache.

    At step k, slot i stands for "k tokens drafted after position i". It sees the step-0 entries of positions <= i,
    made from target features, and its own entry of every later step: a causal block and one diagonal per step. Of
    packed documents (`starts`, as above) it sees its own.
    This equals the engine's cached chain decoding, and a parallel head's rows of one slot. Call `begin_step(k)` before
    the head's k-th step, k = 0, 1, ... Later steps may run on some of the slots alone, each on a part of those before.
    """

    def __init__(self, starts: Tensor | None = None) -> None:
        self._starts = starts
        self._step = -1
        self._slots: Tensor | None = None
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def begin_step(self, step: int, slots: Tensor | None = None) -> None:
        """`slots`: those that this step runs on, for the steps after 0; None for all of them.

        `[M]`, ascending, or `[B, M]`, each row's own, the same for all of these steps.
        """
        assert step == self._step + 1, "training-time-test steps run in order"
        self._step = step
        if self._slots is not None and slots is not None and slots.shape[-1] < self._slots.shape[-1]:
            kept = torch.searchsorted(self._slots, slots)
            for entries in (*self._keys.values(), *self._values.values()):
                entries[1:] = [entry[:, :, kept] for entry in entries[1:]]
        self._slots = slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        assert window is None, "heads see everything"
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        groups = q.shape[1] // k.shape[1]
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(repeat_kv(k, groups))
        values.append(repeat_kv(v, groups))
        if self._step == 0:
            seen = None if self._starts is None else visible(self._starts)
            out = F.scaled_dot_product_attention(q, keys[0], values[0], attn_mask=seen, is_causal=seen is None)
            return out.transpose(1, 2).flatten(2)
        T, scale = keys[0].shape[2], q.shape[3] ** -0.5
        starts = self._starts
        if starts is None:
            starts = torch.zeros(len(q), T, dtype=torch.int64, device=q.device)
        seen = visible(starts, self._slots)
        scores = (q @ keys[0].transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))  # [B, h, rows, T]
        own = torch.stack([(q * key).sum(-1) * scale for key in keys[1:]], dim=-1)  # [B, h, rows, k]
        weights = torch.cat([scores, own], dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :T] @ values[0]
        for index, value in enumerate(values[1:]):
            out = out + weights[..., T + index, None] * value
        return out.transpose(1, 2).flatten(2)
