"""Tokens of a recurrent layer, with states of requests, for tests of its kernels on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.recurrence import convolve, scan
from kernels.recurrent_rows import RecurrentRows
from tests.kernels.reference import recurrence as reference

SLOTS = 6


@dataclass
class Tokens:
    """What a layer is given of N tokens; rows are any of them. Queries, keys and values are columns of one matrix."""

    wide: Tensor  # [N, 3 C], the last third of which is convolved
    qkv: Tensor  # [N, 2 G K + H V]
    decay: Tensor  # [N, H]
    gain: Tensor
    weight: Tensor  # [C, taps]
    bias: Tensor | None
    windows: Tensor  # [SLOTS, taps - 1, C]
    states: Tensor  # [SLOTS, H, K, V]
    groups: int
    delta: bool
    silu: bool

    def copy(self) -> Tokens:
        return replace(self, windows=self.windows.clone(), states=self.states.clone())

    def to(self, device: torch.device) -> Tokens:
        return replace(self, **{name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)})

    def x(self, index: Tensor | slice) -> Tensor:
        """Return `[n, C]`, of which rows lie further apart."""
        return self.wide[index].chunk(3, dim=1)[2]

    def parts(self, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k `[n, G, K]` and v `[n, H, V]`."""
        heads, keys, values = self.states.shape[1:]
        q, k, v = self.qkv[index].split([self.groups * keys, self.groups * keys, heads * values], dim=1)
        return q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (-1, values))

    @torch.no_grad()
    def run(self, tokens: Sequence[int], rows: RecurrentRows) -> tuple[Tensor, Tensor]:
        """Return what the convolution and the scan give for the tokens of the rows, and advance states."""
        index = torch.tensor(tokens, dtype=torch.int64, device=self.wide.device)
        convolved = convolve(self.x(index), self.weight, self.bias, self.windows, rows, silu=self.silu)
        parts = *self.parts(index), self.decay[index], self.gain[index]
        return convolved, scan(*parts, self.states, rows, delta=self.delta)

    def chains(self, tokens: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run certain chains of several requests."""
        rows = RecurrentRows.chains([len(chain) for chain in tokens], slots, self.wide.device)
        return self.run([token for chain in tokens for token in chain], rows)

    def plain(self, tokens: Sequence[int], slot: int) -> tuple[Tensor, Tensor]:
        """Run tokens one at a time."""
        outputs = [self.chains([[token]], [slot]) for token in tokens]
        first, second = zip(*outputs, strict=True)
        return torch.cat(first), torch.cat(second)

    def true(self, tokens: Sequence[int], slot: int, parents: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the oracles' convolution, outputs and states of rows of one request."""
        index = torch.tensor(tokens)
        window, state = self.windows[slot], self.states[slot]
        convolved = reference.convolution(self.x(index), self.weight, self.bias, window, parents, silu=self.silu)
        mixer = reference.gated_delta_net if self.delta else reference.mamba2
        return convolved, *mixer(*self.parts(index), self.decay[index], self.gain[index], state, parents)


def make_tokens(
    count: int,
    dtype: torch.dtype,
    *,
    delta: bool,
    channels: int = 96,
    taps: int = 4,
    heads: int = 4,
    groups: int = 2,
    keys: int = 32,
    values: int = 80,
    bias: bool = False,
    silu: bool = True,
    seed: int = 0,
) -> Tokens:
    """All slots hold junk: states of other requests."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Tokens(
        normal(count, 3 * channels),
        normal(count, 2 * groups * keys + heads * values),
        torch.rand(count, heads, generator=generator),
        torch.rand(count, heads, generator=generator),
        normal(channels, taps),
        normal(channels) if bias else None,
        normal(SLOTS, taps - 1, channels),
        torch.randn(SLOTS, heads, keys, values, generator=generator),
        groups,
        delta,
        silu,
    )


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def picked(outputs: Sequence[Tensor], rows: Sequence[int] | slice) -> list[Tensor]:
    return [output[rows] for output in outputs]
