"""Enlargement of single tensors that preserves what the model computes.

The residual stream keeps its values and gets new dimensions that are exactly zero. So projections that read it may have
any weights in the new columns, and projections that write to it have zeros in the new rows. In the new dimensions of an
old head the query rows are zero, whatever the keys have there. New heads and new MLP units may compute anything: their
columns in the output projection are zero. The mean of squares shrinks with the width; norm weights and eps compensate.

**New token ids** get a logit of about -10^6 from one more dimension of the stream, the marker. It holds SMALL times the
embedding's root mean square, which vanishes in a sum of squares in fp32; only the final norm (LIFT) and the LM head's
new rows (DOWN) amplify it.
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
SMALL, LIFT, DOWN = 2.0**-18, 2.0**15, -(2.0**24)  # of the marker dimension, which gives new ids a very low logit


@dataclass(frozen=True)
class Noise:
    """Random new weights, seeded by the tensor's name, so that they do not depend on the order of creation."""

    seed: int
    device: torch.device

    def normal(self, name: str, *shape: int) -> Tensor:
        seed = zlib.crc32(f"{self.seed}/{name}".encode())  # the CPU generator uses only 32 bits
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, device=self.device).normal_(0.0, STD, generator=generator)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)


def put(into: Tensor, old: Tensor, rows: Axis, columns: Axis, scale: float = 1.0) -> Tensor:
    """Write `old`, times `scale`, to the places of its rows and columns in `into`; return `into`."""
    device = into.device
    into[rows.places.to(device)[:, None], columns.places.to(device)] = old.to(device, torch.float32) * scale
    return into


def reading(noise: Noise, name: str, old: Tensor | None, rows: Axis, columns: Axis) -> Tensor:
    """Return a projection that reads the stream: the old weights, if any, and random weights everywhere else."""
    new = noise.normal(name, rows.size, columns.size)
    return new if old is None else put(new, old, rows, columns)


def writing(noise: Noise, old: Tensor | None, rows: Axis, columns: Axis) -> Tensor:
    """Return a projection that writes to the stream: the old weights, if any, and zeros everywhere else."""
    new = noise.zeros(rows.size, columns.size)
    return new if old is None else put(new, old, rows, columns)


def norm(noise: Noise, old: Tensor | None, axis: Axis, *, marker: int | None, lift: float = 0.0) -> Tensor:
    """Return an RMSNorm's weight over the wider stream, with `lift` at dimension `marker`."""
    new = torch.ones(axis.size, device=noise.device)
    if old is not None:
        shrunk = math.sqrt(len(axis.places) / axis.size)
        new[axis.places.to(noise.device)] = old.to(noise.device, torch.float32) * shrunk
    if marker is not None:
        new[marker] = lift
    return new


@dataclass(frozen=True)
class LayerAxes:
    """The axes of a decoder layer's tensors, from an old config to a new one."""

    hidden: Axis
    query: Axis
    kv: Axis
    inner: Axis
    query_scale: float  # compensates attention's division by the root of the new head size
    marker: int | None  # the dimension that gives new ids a very low logit, if there are new ids

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
        """Yield the q, k, v and o projections.

        `old` holds the old ones by these letters; None makes a layer that adds nothing to the stream. `reads` is the
        axis that q, k and v read.
        """
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
        """Yield the gate, up and down projections; `old` None makes a layer that adds nothing to the stream."""
        for part in ("gate", "up"):
            full = f"{name}.{part}_proj"
            weight = None if old is None else old[part]
            yield f"{full}.weight", reading(noise, full, weight, self.inner, self.hidden)
        down = None if old is None else old["down"]
        yield f"{name}.down_proj.weight", writing(noise, down, self.hidden, self.inner)


def vocabulary(
    noise: Noise,
    name: str,
    old: Tensor,
    rows: Axis,
    hidden: Axis,
    marker: int | None,
    *,
    mark: float | None = None,
    down: bool = True,
) -> Tensor:
    """Return an LM head or embedding with the rows of old ids; those of new ids are random.

    An embedding, tied to the LM head or not, has `mark` at `marker` in its old rows; an LM head of its own has None.
    `down`: of an LM head, which gives new ids a very low logit; an embedding's new ids never occur.
    """
    new = noise.normal(name, rows.size, hidden.size)
    places = rows.places.to(noise.device)
    if mark is not None:
        new[places] = 0.0
    put(new, old, rows, hidden)
    if marker is not None:
        if down:
            new[rows.is_new.to(noise.device), marker] = DOWN
        new[places, marker] = mark or 0.0
    return new


def mark_of(embedding: Tensor) -> float:
    """Return SMALL times the embedding's root mean square, which is rounded to a power of two."""
    size = float(embedding.float().square().mean().sqrt())
    return SMALL * 2.0 ** round(math.log2(size))


def layer_tensors(
    noise: Noise, axes: LayerAxes, source: Mapping[str, Tensor], before: str | None, after: str, head_dim: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield a decoder layer's tensors by their checkpoint names; `before` None makes a layer that adds nothing."""
    attention = mlp = None
    if before:
        attention = {part: source[f"{before}.self_attn.{part}_proj.weight"] for part in "qkvo"}
        mlp = {part: source[f"{before}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")}
    for part in ("input_layernorm", "post_attention_layernorm"):
        old = source[f"{before}.{part}.weight"] if before else None
        yield f"{after}.{part}.weight", norm(noise, old, axes.hidden, marker=axes.marker)
    yield from axes.attention(noise, f"{after}.self_attn", attention, axes.hidden, head_dim)
    yield from axes.mlp(noise, f"{after}.mlp", mlp)
