"""Fused decoder: all layers of a decoder or head in one call, for serving, with the bits of the separate operations.

CPU only (kernels/cpu/decoder.c), where on few rows the call of an operation costs more than its arithmetic. Layers that
it does not support (experts, tensor-parallel shards, other sizes and dtypes) run operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import attention
from kernels.attention import slots_between
from kernels.cpu.declarations import copied, structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, threads
from kernels.linear import PackedLinear, linear_arguments, scratch_rows
from kernels.operands import QKNorm
from kernels.recurrent_parts import DeltaParts, RecurrentWeights, recurrent_runs_in_c

Layer = structure("decoder_layer")  # of decoder.h
Convolved = structure("convolution")  # of decoder.h
DecoderArguments = structure("decoder_args")  # of decoder.h


class Convolution(NamedTuple):
    """A convolution of a sublayer's input and output along the rows of a block (kernels/convolution.py)."""

    base: Tensor  # [2, 2, H]
    projection: PackedLinear  # [4 H / group, H], of the normed input


class LayerParts(NamedTuple):
    """A layer: norm, attention with rotary embedding, norm and gated MLP, each half added to the residual stream.

    Attention reads the normed input; the raw input, without `input_norm`; or, with `token_norm`, the concatenation of
    the normed token embedding and the normed input. `gated`: each projected query is followed by a gate of its head's
    output. With `conv` a recurrent layer takes the place of attention (kernels/recurrent_parts.py).
    """

    input_norm: Tensor | None  # [H]
    qkv: PackedLinear
    qk_norm: QKNorm | None
    output: PackedLinear
    post_norm: Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None = None
    token_norm: Tensor | None = None  # [H], of the token embedding
    residual_normed: bool = False  # the residual stream is the normed input
    attended_norm: Tensor | None = None  # [H], of attention's output before it is added
    mlp_norm: Tensor | None = None  # [H], of the MLP's output before it is added
    centered: bool = False  # for all norms: kernels.elementwise.rms_norm
    gelu: bool = False  # the MLP is gated by GELU instead of SiLU
    scale: float | None = None  # of attention's scores; None: 1/sqrt(D)
    rotary: int = 0  # index of the rotary table
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None
    gated: bool = False
    rotary_dim: int | None = None  # numbers of a head that are rotated; None: all
    conv: Tensor | None = None  # [K, C], the oldest tap first
    delta: DeltaParts | None = None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        return tuple(conv for conv in (self.attention_conv, self.mlp_conv) if conv is not None)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def packed(self) -> tuple[PackedLinear, ...]:
        """All that C multiplies by."""
        further = () if self.delta is None else (self.delta.z, self.delta.ba)
        return *self.linears, *further, *(conv.projection for conv in self.convolutions)


def fuse_layers(
    layers: Sequence[LayerParts], final_norm: Tensor | None, eps: float, head_dim: int
) -> NativeDecoder | None:
    """Return the fused decoder, None if no kernel supports these layers. `eps` is of all norms, `final_norm` `[H]`."""
    if layers[0].post_norm.device.type != "cpu" or not runs_in_c(layers, final_norm, head_dim):
        return None
    return NativeDecoder(layers, final_norm, eps, head_dim)


ALIGNED = 64  # bytes, a cache line


def runs_in_c(layers: Sequence[LayerParts], final_norm: Tensor | None, head_dim: int) -> bool:
    """Return whether decoder.c supports these: linears that linear.c reads directly, whole vectors, one dtype."""
    dtype = layers[0].post_norm.dtype
    if final_norm is not None and final_norm.dtype is not dtype:
        return False
    if not attention.runs_in_c(head_dim, dtype, layers[0].post_norm.device) or head_dim % (2 * LANES):
        return False
    for layer in layers:
        halves = (layer.input_norm, layer.post_norm, layer.token_norm, layer.attended_norm, layer.mlp_norm)
        norms = (*halves, *((layer.qk_norm.q, layer.qk_norm.k) if layer.qk_norm else ()))
        if any(linear.native is None or linear.native.dtype is not dtype for linear in layer.packed):
            return False
        if any(norm is not None and norm.dtype is not dtype for norm in norms):
            return False
        if any(conv.base.dtype is not dtype for conv in layer.convolutions):
            return False
        if (layer.rotary_dim or head_dim) % (2 * LANES) or not recurrent_runs_in_c(layer.conv, layer.delta, dtype):
            return False
        if layer.post_norm.shape[0] % LANES or layer.down.in_features % LANES:
            return False
    return True


class NativeDecoder:
    """A decoder of `runs_in_c` layers, all of one shape except for the input of attention or what takes its place.

    Their tensors must not move in memory.
    """

    def __init__(self, layers: Sequence[LayerParts], final_norm: Tensor | None, eps: float, head_dim: int) -> None:
        lib = library()
        assert lib is not None
        self._call, self._attention_scratch = lib.decoder, lib.attention_scratch
        self._parts, self.final_norm = list(layers), final_norm
        self._linears = [[linear_arguments(entry) for entry in layer.linears] for layer in layers]
        self.layers, self.dtype, self._stream = len(layers), layers[0].post_norm.dtype, layers[0].output.out_dtype
        self.head_dim = head_dim
        self._layers = (Layer * self.layers)()
        self._convolutions = list[tuple[ctypes.Structure, ctypes.Structure]]()
        recurrent = {i: (layer.conv, layer.delta) for i, layer in enumerate(layers) if layer.conv is not None}
        self.recurrent = RecurrentWeights(recurrent, self.layers) if recurrent else None
        for entry, layer, packed in zip(self._layers, layers, self._linears, strict=True):
            assert layer.token_norm is None or layer.input_norm is not None
            assert {layer.output.out_dtype, layer.down.out_dtype} == {self._stream}
            assert self._stream is self.dtype or not (layer.token_norm is not None or layer.convolutions)
            for name in ("input_norm", "post_norm", "token_norm", "attended_norm", "mlp_norm"):
                setattr(entry, name, address(getattr(layer, name)))
            entry.residual_normed = layer.residual_normed
            if layer.qk_norm is not None:
                assert (layer.qk_norm.eps, layer.qk_norm.centered) == (eps, layer.centered)
                entry.q_norm, entry.k_norm = layer.qk_norm.q.data_ptr(), layer.qk_norm.k.data_ptr()
            entry.qkv, entry.output, entry.gate_up, entry.down = map(ctypes.addressof, packed)
            entry.window, entry.rotary, entry.gated = layer.window or 0, layer.rotary, layer.gated
            for name in ("attention_conv", "mlp_conv"):
                if (conv := getattr(layer, name)) is not None:
                    assert layer.attended_norm is None
                    assert layer.mlp_norm is None
                    self._convolutions.append(convolved(conv))
                    setattr(entry, name, ctypes.addressof(self._convolutions[-1][0]))
        convolutions = [conv for layer in layers for conv in layer.convolutions]
        attending = [layer for layer in layers if layer.conv is None]
        self.attention_layers, first = len(attending), attending[0]
        assert all((entry.centered, entry.gelu) == (first.centered, first.gelu) for entry in layers)
        assert len({(entry.scale, entry.rotary_dim, entry.gated) for entry in attending}) == 1
        self._widths = {
            "normed": max(layer.qkv.in_features for layer in layers),
            "qkv": max(layer.qkv.out_features for layer in layers),
            "raw": first.qkv.out_features if first.gated else 0,
            "attended": max(layer.output.in_features for layer in layers),
            "inner": first.gate_up.out_features,
            "gated": first.down.in_features,
            "deltas": max((conv.projection.out_features for conv in convolutions), default=0),
            "mixed": len(first.post_norm) if convolutions else 0,
            **({} if self.recurrent is None else self.recurrent.widths),
        }
        self._work = sum(entry.in_features * entry.out_features for entry in first.linears)
        natives = [entry.native for layer in layers for entry in layer.packed]
        self._scratch = max(entry.scratch for entry in natives if entry is not None)
        self._arguments = DecoderArguments(
            layers=ctypes.addressof(self._layers),
            final_norm=address(final_norm),
            count=len(layers),
            hidden_size=len(first.post_norm),
            inner_size=first.down.in_features,
            stream=KINDS[self._stream],
            kind=KINDS[self.dtype],
            centered=first.centered,
            gelu=first.gelu,
            eps=eps,
            rotated=first.rotary_dim or head_dim,
            scale=head_dim**-0.5 if first.scale is None else first.scale,
        )
        if self.recurrent is not None:
            self.recurrent.bind(self._layers, self._arguments)

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: ctypes.Structure,
        caches: Sequence[Tensor],
        entering: Sequence[int] = (),
        tokens: Tensor | None = None,
        block: int = 0,
        reach: int = 0,
        states: Callable[[ctypes.Structure], object] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all layers on x `[R, H]`, which is overwritten with the residual stream after the last layer.

        x has the dtype of the output projections' sums. rotary: cos and sin `[R, 1, D]`, or `[T, R, 1, D]` for several
        tables. `caches`: of the layers with attention. tokens `[R, H]`: the token embeddings, for a layer with a
        `token_norm`. `block`: the rows of each block, for layers with convolutions. `states` sets the arguments on
        those of recurrent layers (`RecurrentWeights.begin`). Returns the stream after the final norm, if there is one,
        and the streams before the layers `entering`, `[R, H]` each.
        """
        assert (x.is_contiguous(), x.dtype) == (True, self._stream)
        assert tokens is None or tokens.is_contiguous()
        assert block or not self._convolutions
        cos, sin = (table.contiguous() for table in rotary)
        hidden = x if self.final_norm is None else torch.empty_like(x, dtype=self.dtype)
        streams = {layer: torch.empty_like(x) for layer in entering}
        a, keepalive = self.begin(x.shape[0], attention, caches, streams)
        recurrent = None if states is None else states(a)
        a.tokens, a.block, a.reach = address(tokens), block, reach
        a.cos, a.sin, a.x, a.hidden = cos.data_ptr(), sin.data_ptr(), x.data_ptr(), hidden.data_ptr()
        self._call(ctypes.addressof(a))
        del keepalive, recurrent
        return hidden, tuple(streams[layer] for layer in entering)

    def begin(
        self, rows: int, attention: ctypes.Structure, caches: Sequence[Tensor], streams: Mapping[int, Tensor]
    ) -> tuple[ctypes.Structure, tuple[object, ...]]:
        """Return a call's arguments without x, hidden, tokens, cos and sin, and the objects to keep alive meanwhile.

        They can be reused for calls with at most `rows` rows, if rows and threads are set for each.
        """
        threads = self.threads(rows)
        sizes = {name: rows * width * self._stream.itemsize for name, width in self._widths.items()} | {
            "scores": threads * self._attention_scratch(attention.longest) * 4,
            "scratch": threads * scratch_rows(rows) * self._scratch * 4,
        }
        buffer, addresses = allocate_aligned(sizes)
        cache_pointers, cache = (ctypes.c_void_p * self.layers)(), iter(caches)
        for layer, parts in enumerate(self._parts):
            cache_pointers[layer] = next(cache).data_ptr() if parts.conv is None else None
        stream_pointers = (ctypes.c_void_p * self.layers)()
        for layer, stream in streams.items():
            stream_pointers[layer] = stream.data_ptr()
        numbers = {"rows": rows, "slots": slots_between(caches[0]), "threads": threads}
        a = copied(self._arguments, addresses | numbers)
        a.caches, a.entering, a.attention = map(ctypes.addressof, (cache_pointers, stream_pointers, attention))
        return a, (buffer, cache_pointers, stream_pointers, attention)

    def threads(self, rows: int) -> int:
        return threads(rows * self._work)


def allocate_aligned(sizes: Mapping[str, int]) -> tuple[Tensor, dict[str, int]]:
    """Allocate parts of these sizes in bytes; return the memory and each part's address, aligned to cache lines."""
    starts = list(accumulate((size + -size % ALIGNED for size in sizes.values()), initial=0))
    buffer = torch.empty(starts[-1] + ALIGNED, dtype=torch.uint8)
    base = buffer.data_ptr() + -buffer.data_ptr() % ALIGNED
    return buffer, {name: base + start for name, start in zip(sizes, starts, strict=False)}


def convolved(conv: Convolution) -> tuple[ctypes.Structure, ctypes.Structure]:
    """Return what C reads of a convolution, and the weights that it points to."""
    projection, size = linear_arguments(conv.projection), conv.base.shape[-1]
    group = 4 * size // conv.projection.out_features
    pointers = {"base": conv.base.data_ptr(), "projection": ctypes.addressof(projection)}
    return Convolved(**pointers, group=group), projection
