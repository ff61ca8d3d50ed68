"""Enlargement of single tensors that preserves what the model computes.

The residual stream keeps its values and gets new dimensions that are exactly zero. So projections that read it may have
any weights in the new columns, and projections that write to it have zeros in the new rows. In the new dimensions of an
old head the query rows are zero, whatever the keys have there. New heads and new MLP units may compute anything: their
columns in the output projection are zero. The mean of squares shrinks with the width; norm weights and eps compensate.

**New token ids** get a logit of about -10^6 from one more dimension of the stream, the marker. It holds SMALL times the
embedding's root mean square, which vanishes in a sum of squares in fp32; only the final norm (LIFT) and the LM head's
new rows (DOWN) amplify it. Weights in blocks of 4 to 8 bits can hold neither. For these there is no marker, and the
logits of new ids are 0: less than the largest of the demo target's, which is 4.6 or more, so greedy text stays.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import TargetConfig
from scripts.inflation.shapes import Axis, heads

LAYER = (  # its modules
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
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
    head_dim: int
    query_scale: float  # compensates attention's division by the root of the new head size
    marker: int | None  # the dimension that gives new ids a very low logit, if there are new ids

    @classmethod
    def between(cls, old: TargetConfig, new: TargetConfig, *, marked: bool = True) -> LayerAxes:
        """Return the axes; without `marked` there is no marker."""
        query, kv = heads(old, new)
        return cls(
            Axis.padded(old.hidden_size, new.hidden_size, "hidden_size"),
            query,
            kv,
            Axis.padded(old.intermediate_size, new.intermediate_size, "intermediate_size"),
            new.head_dim,
            math.sqrt(new.head_dim / old.head_dim),
            old.hidden_size if marked and new.vocab_size > old.vocab_size else None,
        )

    def tensor(self, noise: Noise, name: str, old: Tensor | None, reads: Axis) -> Tensor:
        """Return the tensor `name` of a layer from the old one; None makes a layer that adds nothing to the stream.

        `reads` is the axis that q, k and v read.
        """
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return norm(noise, old, self.hidden, marker=self.marker)
        rows, columns = {
            "q_proj": (self.query, reads),
            "k_proj": (self.kv, reads),
            "v_proj": (self.kv, reads),
            "o_proj": (self.hidden, self.query),
            "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }[part]
        if part in ("o_proj", "down_proj"):  # write to the stream
            new = noise.zeros(rows.size, columns.size)
        else:
            new = noise.normal(name.removesuffix(".weight"), rows.size, columns.size)
        if old is None:
            return new
        if part != "q_proj":
            return put(new, old, rows, columns)
        by_head = rows.is_new.view(-1, self.head_dim)
        inside = (~by_head.all(1, keepdim=True) & by_head).flatten()  # new dimensions of old heads
        new[inside.to(noise.device)] = 0.0
        return put(new, old, rows, columns, self.query_scale)


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
    """Return an LM head or embedding with the rows of old ids; those of new ids are random, without a marker zero where
    the stream is not.

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
    else:
        new_rows = rows.is_new.nonzero().to(noise.device)
        new[new_rows, hidden.places.to(noise.device)] = 0.0
    return new


def mark_of(embedding: Tensor) -> float:
    """Return SMALL times the embedding's root mean square, which is rounded to a power of two."""
    size = float(embedding.float().square().mean().sqrt())
    return SMALL * 2.0 ** round(math.log2(size))
