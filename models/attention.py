"""The attention interface that a layer calls, and the dense implementations for training.

`attention(layer, q, k, v)` receives rotated queries and keys of the current tokens and returns `[..., heads * D]`.
The implementation decides where older keys come from (nowhere, earlier training-time-test steps, a paged pool); the
paged one is part of the engine (infer/kvcache/pool.py, kernels/attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.block_attention import block_attention
from kernels.decoder import NativeDecoder
from kernels.operands import QKNorm
from kernels.ttt_attention import operand, repeat_kv, ttt_attention, visible
from models.recurrence import CausalRecurrence

Rotary = tuple[Tensor, Tensor]  # cosines and sines of the rows' positions


class Attention(Protocol):
    """Contract: q `[..., nh, D]`, k and v `[..., nkv, D]` with nh a multiple of nkv; returns `[..., nh * D]`.

    With `window` a row at position p attends only to positions above p - window. `scale` of the scores: None for
    1/sqrt(D). `sinks` `[nh]`: a score of each head that takes part in the softmax, as of a key whose value is zero.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class WriteKeys(Protocol):
    """Stores keys and values of rows that attend to nothing themselves: k and v `[..., nkv, D]` of one layer."""

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None: ...


class Project(Protocol):
    """`attention.project`, if there is one, norms, rotates and stores keys and values in one call.

    qkv `[R, nh + 2 nkv, D]` as projected, cos and sin `[R, 1, D]`; returns `[R, nh * D]`.
    """

    def __call__(
        self, layer: int, qkv: Tensor, rotary: tuple[Tensor, Tensor], norm: QKNorm | None, *,
        window: int | None = None, scale: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class Decode(Protocol):
    """`attention.decode`, if there is one, runs all layers of a packed decoder in one call.

    x `[R, H]` is overwritten with the residual stream after the last layer; tokens `[R, H]` are the token embeddings
    that a head's layer reads beside it; `block` is the number of rows of each block, for layers with convolutions;
    windows reach back `reach` positions further. Returns the stream after the final norm, if there is one, and the
    streams entering the layers `entering`.
    """

    def __call__(
        self,
        decoder: NativeDecoder,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        entering: Sequence[int] = (),
        tokens: Tensor | None = None,
        block: int = 0,
        reach: int = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


def no_attention(
    layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The attention that is passed to a head without attention layers; raises AssertionError if called."""
    raise AssertionError("this head attends to nothing")


class CausalAttention(CausalRecurrence):
    """Every slot of `[B, T]` attends to itself and to all earlier slots of its own document. Stateless."""

    def __init__(self, starts: Tensor | None = None) -> None:
        super().__init__(starts)
        self._seen = None if starts is None else visible(starts)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        groups, T = q.shape[1] // k.shape[1], q.shape[2]
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        mask = self._seen
        if window is not None and window < T:
            window_mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
            mask = window_mask if mask is None else mask & window_mask
        if sinks is not None:
            seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril() if mask is None else mask
            scores = q.new_zeros(len(q), len(sinks), T, T).masked_fill_(~seen, -torch.inf)
            mask = torch.cat([scores, sinks.to(q.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2).flatten(2)


class TrainingTimeTestAttention:
    """EAGLE-3's training-time test (arXiv 2503.01840): attention to the keys a chain draft would find in its cache.

    At step k, slot i stands for "k tokens drafted after position i". It attends to the step-0 entries of positions
    <= i, made from target features, and to its own entry of every later step: a causal block and one diagonal per step.
    Of packed documents (`starts`, as above) it attends only to its own.
    This equals the engine's cached chain decoding, and the attention among a parallel head's rows of one slot. Call
    `begin_step(k)` before the head's k-th step, k = 0, 1, ... Later steps may run on a subset of the slots, each on a
    subset of the step before it.
    """

    def __init__(self, starts: Tensor | None = None) -> None:
        self._starts = starts
        self._step = -1
        self._slots: Tensor | None = None
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def begin_step(self, step: int, slots: Tensor | None = None) -> None:
        """Begin step `step`. `slots`, for steps after 0, are the slots that it runs on; None for all of them.

        `[M]`, ascending, or `[B, M]`, separate for each row and then the same in all of these steps.
        """
        assert step == self._step + 1, "training-time-test steps run in order"
        self._step = step
        if self._slots is not None and slots is not None and slots.shape[-1] < self._slots.shape[-1]:
            index = torch.searchsorted(self._slots, slots)
            for entries in (*self._keys.values(), *self._values.values()):
                entries[1:] = [entry[:, index] for entry in entries[1:]]
        self._slots = slots

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert sinks is None, "heads have no sinks"
        assert window is None or window > self._step, "a window holds the rows of a draft"
        q = q if scale is None else q * (scale * q.shape[-1] ** 0.5)  # the kernels scale by the keys' size
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(operand(k))
        values.append(operand(v))
        last = None if window is None else window - self._step  # the row lies as many positions past its slot
        return ttt_attention(q, keys, values, self._slots, self._starts, last).flatten(2)


def select(x: Tensor | None, rows: Tensor) -> Tensor:
    """Return rows `[N]` of x `[B, T, ...]`, numbered through all sequences: `[N, ...]`."""
    assert x is not None, "a layer that computes kept rows alone has a residual"
    return x.flatten(0, 1).index_select(0, rows)


class ServedAttention(NamedTuple):
    """Attention of rows in a line, `[N, ...]`: those of `rows` among the slots `[B, M]` that `attention` runs on.

    With `kept` all slots `[B, T]` come in, whose keys are read, and the outputs are those of the slots `kept` `[N]`.
    """

    attention: TrainingTimeTestAttention
    rows: Tensor
    slots: torch.Size
    kept: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        """`[N, ...]` -> `[B, M, ...]`, 0 elsewhere."""
        full = x.new_zeros(self.slots.numel(), *x.shape[1:])
        return full.index_copy(0, self.rows, x).unflatten(0, self.slots)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.kept is None:
            q, k, v = map(self.spread, (q, k, v))
        else:
            q = self.spread(select(q, self.kept))
        return select(self.attention(layer, q, k, v, **options), self.rows)


class BlockAttention:
    """Attention of a block drafter's rows in training (kernels/block_attention.py): context keys and their own block's.

    slots `[B, M]`: the anchor slot of each block; starts `[B, T]` as above. `write` takes the context's keys and values
    of a layer, `[B, T, nkv, D]`, before the layer's rows attend; `attend(causal)` is the attention of a mask kind.
    """

    def __init__(self, slots: Tensor, starts: Tensor | None = None) -> None:
        self._slots, self._starts = slots, starts
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._context[layer] = k, v

    def attend(self, causal: bool) -> Attention:
        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            assert sinks is None, "heads have no sinks"
            assert scale in (None, q.shape[-1] ** -0.5), "heads scale by their size"
            rows = q, self._context[layer], (k, v), self._slots, self._starts
            return block_attention(*rows, causal=causal, window=window).flatten(3)

        return attention
