"""A target whose decoder layers are sharded among processes that all run it: ZeRO-3 (arXiv 1910.02054), as FSDP does.

Each process keeps its shard of every layer's weights. A layer's full weights exist only while it runs, in one of two
buffers that the layers use in turn; while one layer runs, the next is all-gathered. Embedding, final norm and LM head,
which the loss reads as well, are replicated. Unlike in tensor_parallel.py every process computes whole layers on its
own rows, so a row's result is that of one process: the same operations on the same weights. Does no communication
itself: the caller supplies an `Exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kernels.linear import PackedLinear
from kernels.weights.quantize import WeightFormat
from models.layers import Linear

ALIGN = 64  # elements: tensors are aligned as if allocated separately; otherwise kernels might take other code paths
NUM_BUFFERS = 2


class Exchange(Protocol):
    rank: int
    ranks: int

    def gather(self, gathered: Tensor, shard: Tensor) -> Callable[[], Any]:
        """Start filling `gathered` with every process's `shard` in rank order; return a function that waits for it."""
        ...

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any process."""
        ...


class Span(NamedTuple):
    """The position of a parameter in its layer's flat buffer, in elements."""

    name: str
    shape: torch.Size
    begin: int


class GatheredLinear(Linear):
    """A linear layer packed anew on every call, since its weight is gathered per forward; same bits as a packed one."""

    _exact: bool | None = None  # set by `pack`

    def pack(self, *, exact: bool = True, weight_format: WeightFormat = "same", quantize_rows: bool = False) -> None:
        assert weight_format == "same", "refused with the configuration"
        self._exact = exact

    def forward(self, input: Tensor) -> Tensor:
        if self._exact is None:
            return self._unpacked(input)
        return PackedLinear(self.weight, self.bias, exact=self._exact, out_dtype=self.out_dtype)(input)


class ShardedLayers(nn.Module):
    """This process's shards of `layers`, which must be on the meta device, and the all-gather of whole layers.

    `load(index)` must load the weights of one layer to the CPU; at most one layer is whole there at a time. A forward
    visits all layers in order. All processes must run the same number of forwards, or call `join_gathers` where these
    may differ.
    """

    def __init__(
        self, layers: Sequence[nn.Module], exchange: Exchange, load: Callable[[int], None], device: str | torch.device
    ) -> None:
        super().__init__()
        self._exchange, self._count = exchange, len(layers)
        self._wait: Callable[[], Any] | None = None
        for layer in layers:
            _gather_linears(layer)
        dtype, *others = {parameter.dtype for layer in layers for parameter in layer.parameters()}
        if others:
            raise ValueError(
                "features.target=sharded: this target keeps routers or decays in fp32, whatever the model's dtype is, "
                "and a shard has one dtype; use model.dtype=float32 or another features.target"
            )
        spans = [_spans(layer) for layer in layers]
        sizes = [_shard_size(layer_spans, exchange.ranks) for layer_spans in spans]
        self.own = nn.Parameter(torch.empty(sum(sizes), dtype=dtype, device=device), requires_grad=False)
        buffers = [torch.empty(max(sizes) * exchange.ranks, dtype=dtype, device=device) for _ in range(NUM_BUFFERS)]
        self._shards = self.own.data.split(sizes)
        self._full_weights = [buffers[index % NUM_BUFFERS][: size * exchange.ranks] for index, size in enumerate(sizes)]
        for index, layer in enumerate(layers):
            load(index)
            full_weight = torch.zeros(sizes[index] * exchange.ranks, dtype=dtype)
            for name, shape, begin in spans[index]:
                full_weight[begin : begin + prod(shape)] = layer.get_parameter(name).detach().flatten()
            self._shards[index].copy_(full_weight.view(exchange.ranks, -1)[exchange.rank])
            for name, shape, begin in spans[index]:
                view = self._full_weights[index][begin : begin + prod(shape)].view(shape)
                _set_parameter(layer, name, nn.Parameter(view, requires_grad=False))
            layer.register_forward_pre_hook(partial(self._pre_forward, index))

    def join_gathers(self) -> None:
        """Join the other processes' forwards (all-gathers) until none has any left; every process must call this."""
        while self._exchange.any(False):
            for index in range(self._count):
                self._prepare(index)

    def _pre_forward(self, index: int, *_: Any) -> None:
        if index == 0:
            self._exchange.any(True)
        self._prepare(index)

    def _prepare(self, index: int) -> None:
        if index == 0:
            self._start_gather(0)
        assert self._wait is not None, "layers are visited in order"
        self._wait()
        self._wait = None
        if index + 1 < self._count:
            self._start_gather(index + 1)

    def _start_gather(self, index: int) -> None:
        self._wait = self._exchange.gather(self._full_weights[index], self._shards[index])


def _gather_linears(layer: nn.Module) -> None:
    for module in list(layer.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                with torch.device("meta"):
                    gathered = GatheredLinear(child.in_features, child.out_features, bias=child.bias is not None)
                gathered._parameters, gathered.out_dtype = child._parameters, child.out_dtype
                setattr(module, name, gathered)


def _spans(layer: nn.Module) -> list[Span]:
    spans, begin = [], 0
    for name, parameter in layer.named_parameters():
        spans.append(Span(name, parameter.shape, begin))
        begin += -(-parameter.numel() // ALIGN) * ALIGN
    return spans


def _shard_size(spans: Sequence[Span], ranks: int) -> int:
    """Return the number of elements of a layer that each process keeps."""
    end = spans[-1].begin + prod(spans[-1].shape)
    return -(-end // (ranks * ALIGN)) * ALIGN


def _set_parameter(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module_name, _, parameter_name = name.rpartition(".")
    layer.get_submodule(module_name)._parameters[parameter_name] = parameter
