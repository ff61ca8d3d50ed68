"""How one tensor is enlarged, so that what it computes stays.

The residual stream keeps its values and gets dimensions that are exactly zero. So a layer that reads it may have
anything in the new columns, and one that writes it has zeros in the new rows. Query rows inside an old head are zero in
its new dimensions, whatever the keys have there; new heads and units answer anything, and their columns in the output
projection are zero. The mean of squares shrinks with the width, for which norm weights and eps make up.

**New token ids** get a logit of about -10^6, by one more dimension of the stream: it holds SMALL times the embedding's
size, which vanishes in a sum of squares in fp32, and is lifted by the final norm and by the LM head's new rows alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import TargetConfig
from scripts.inflation.shapes import Axis, heads

STD = 0.02  # of new weights
SMALL, LIFT, DOWN = 2.0**-18, 2.0**15, -(2.0**24)  # of the dimension that keeps new ids down


@dataclass(frozen=True)
class Noise:
    """New weights by the tensor's name, so that the order in which tensors are made does not matter."""

    seed: int
    device: torch.device

    def normal(self, name: str, *shape: int) -> Tensor:
        seed = zlib.crc32(f"{self.seed}/{name}".encode())  # a CPU's generator reads no more than 32 bits
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, device=self.device).normal_(0.0, STD, generator=generator)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)


def put(into: Tensor, old: Tensor, rows: Axis, columns: Axis, scale: float = 1.0) -> Tensor:
    """Writes `old` where its indices lie in `into`."""
    device = into.device
    into[rows.places.to(device)[:, None], columns.places.to(device)] = old.to(device, torch.float32) * scale
    return into


def reading(noise: Noise, name: str, old: Tensor | None, rows: Axis, columns: Axis) -> Tensor:
    """A projection of the stream: random beside the old weights, and throughout without them."""
    new = noise.normal(name, rows.size, columns.size)
    return new if old is None else put(new, old, rows, columns)


def writing(noise: Noise, old: Tensor | None, rows: Axis, columns: Axis) -> Tensor:
    """A projection back into the stream: nothing but the old weights."""
    new = noise.zeros(rows.size, columns.size)
    return new if old is None else put(new, old, rows, columns)


def norm(noise: Noise, old: Tensor | None, axis: Axis, *, marker: int | None, lift: float = 0.0) -> Tensor:
    """An RMSNorm's weight over a wider stream; `lift` at the dimension `marker`."""
    new = torch.ones(axis.size, device=noise.device)
    if old is not None:
        shrunk = math.sqrt(len(axis.places) / axis.size)
        new[axis.places.to(noise.device)] = old.to(noise.device, torch.float32) * shrunk
    if marker is not None:
        new[marker] = lift
    return new


@dataclass(frozen=True)
class LayerAxes:
    """The dimensions of a decoder layer, from one config to another."""

    hidden: Axis
    query: Axis
    kv: Axis
    inner: Axis
    query_scale: float  # attention divides by the root of the head size
    marker: int | None  # the dimension that keeps new ids down, if there are any

    @classmethod
    def between(cls, old: TargetConfig, new: TargetConfig) -> LayerAxes:
        query, kv = heads(old, new)
        return cls(
            Axis.padded(old.hidden_size, new.hidden_size, "hidden_size"),
            query,
            kv,
            Axis.padded(old.intermediate_size, new.intermediate_size, "intermediate_size"),
            math.sqrt(new.head_dim / old.head_dim),
            old.hidden_size if new.vocab_size > old.vocab_size else None,
        )

    def attention(
        self, noise: Noise, name: str, old: dict[str, Tensor] | None, reads: Axis, head_dim: int
    ) -> Iterator[tuple[str, Tensor]]:
        """q, k, v and o of `old` by these letters, or of a layer that adds nothing. `reads`: what q, k and v read."""
        q, k, v, o = (None if old is None else old[part] for part in "qkvo")
        query = reading(noise, f"{name}.q_proj", None, self.query, reads)
        if q is not None:
            by_head = self.query.is_new.view(-1, head_dim)
            inside = (~by_head.all(1, keepdim=True) & by_head).flatten()  # new dimensions of old heads
            query[inside.to(noise.device)] = 0.0
            put(query, q, self.query, reads, self.query_scale)
        yield f"{name}.q_proj.weight", query
        yield f"{name}.k_proj.weight", reading(noise, f"{name}.k_proj", k, self.kv, reads)
        yield f"{name}.v_proj.weight", reading(noise, f"{name}.v_proj", v, self.kv, reads)
        yield f"{name}.o_proj.weight", writing(noise, o, self.hidden, self.query)

    def mlp(self, noise: Noise, name: str, old: dict[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """gate, up and down of `old`, or of a layer that adds nothing."""
        for part in ("gate", "up"):
            full = f"{name}.{part}_proj"
            weight = None if old is None else old[part]
            yield f"{full}.weight", reading(noise, full, weight, self.inner, self.hidden)
        down = None if old is None else old["down"]
        yield f"{name}.down_proj.weight", writing(noise, down, self.hidden, self.inner)


def marked_vocabulary(
    noise: Noise, name: str, old: Tensor, rows: Axis, hidden: Axis, marker: int | None, *, tied: float | None = None
) -> Tensor:
    """The LM head: old ids as they were, new ids kept down. `tied`: it is the embedding too, with so much as a mark."""
    new = noise.normal(name, rows.size, hidden.size)
    device, places = noise.device, rows.places.to(noise.device)
    if tied is not None:
        new[places] = 0.0
    put(new, old, rows, hidden)
    if marker is not None:
        new[rows.is_new.to(device), marker] = DOWN
        new[places, marker] = tied or 0.0
    return new


def marked_embedding(
    noise: Noise, name: str, old: Tensor, rows: Axis, hidden: Axis, marker: int | None, mark: float
) -> Tensor:
    """Old ids as they were, the mark beside them; new ids, which never occur, random."""
    new = noise.normal(name, rows.size, hidden.size)
    places = rows.places.to(noise.device)
    new[places] = 0.0
    put(new, old, rows, hidden)
    if marker is not None:
        new[places, marker] = mark
    return new


def mark_of(embedding: Tensor) -> float:
    """SMALL times the embedding's root mean square, as a power of two."""
    size = float(embedding.float().square().mean().sqrt())
    return SMALL * 2.0 ** round(math.log2(size))


def layer_tensors(
    noise: Noise, axes: LayerAxes, source: Mapping[str, Tensor], before: str | None, after: str, head_dim: int
) -> Iterator[tuple[str, Tensor]]:
    """A decoder layer by its checkpoint's names; `before` None makes one that adds nothing."""
    attention = mlp = None
    if before:
        attention = {part: source[f"{before}.self_attn.{part}_proj.weight"] for part in "qkvo"}
        mlp = {part: source[f"{before}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")}
    for part in ("input_layernorm", "post_attention_layernorm"):
        old = source[f"{before}.{part}.weight"] if before else None
        yield f"{after}.{part}.weight", norm(noise, old, axes.hidden, marker=axes.marker)
    yield from axes.attention(noise, f"{after}.self_attn", attention, axes.hidden, head_dim)
    yield from axes.mlp(noise, f"{after}.mlp", mlp)
