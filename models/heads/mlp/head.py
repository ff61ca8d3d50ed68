"""MLP speculator (arXiv 2404.19124): a small recurrent network with separate weights at every depth; and the LSTM
speculator (Arctic Inference, Snowflake), whose state passes the gates of an LSTM.

Depth 0 takes the target's final hidden state f[i] and token t[i+1], depth d the state of depth d - 1 and the token
drafted there. No attention and no position: a draft depends on one hidden state and the tokens after it. From token x,
state s and cell c (at depth 0 none), with α the scale of embeddings:

    MLP:  s = GELU(norm(W s + α E(x)))
    LSTM: f, i, o = σ(W s + α E(x)); c = f c + i GELU(norm(W s + α E(x))); s = o GELU(norm(c))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from kernels.elementwise import activate, embed_norm_gelu, rms_norm, uniform
from models.attention import Attention
from models.heads.base import Head, Readout, RecurrentHead
from models.heads.mlp.config import SpeculatorShape
from models.heads.weights import HeadModule, Layout
from models.layers import Embedding, Linear, make_lm_head
from models.targets.llama import LlamaTarget

EPS = 1e-6
GATES = ("forget", "input", "output", "cell")  # the last one's activation is another


class ShiftedRMSNorm(nn.Module):
    """A root-mean-square norm with scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPS, out_dtype=x.dtype) + self.bias


class SpeculatorHead(RecurrentHead):
    """A recurrent head without decoder layers. Each list holds one module per depth, or if weights are tied one in all
    (`proj`: the first and one more); of an embedding, a projection or a norm that has several layers a sequence.

    With gates `emb` holds an embedding for each of GATES, or one for all; each of `proj` is the projections of all
    gates in one; the state is the LSTM's, and the cell after it.
    """

    config: SpeculatorShape

    def __init__(self, config: SpeculatorShape) -> None:
        super().__init__()
        self.config = config
        size, vocab, depths = config.width, config.vocab_size, range(config.depths)
        inputs = [config.target_hidden_size, *[config.hidden_size] * (config.n_predict - 1)]
        inputs = inputs[:2] if config.tie_weights else inputs
        if config.has_gates:
            self.emb = nn.ModuleList(Embedding(vocab, size) for _ in range(1 if config.tie_gates else len(GATES)))
            self.proj = nn.ModuleList(Linear(width, len(GATES) * size, bias=False) for width in inputs)
            self.cell_ln, self.state_ln = (nn.ModuleList([ShiftedRMSNorm(size)]) for _ in range(2))
        else:
            self.emb = nn.ModuleList(
                stack(Embedding(vocab, size), *layers(size, config.emb_layers - 1)) for _ in depths
            )
            more = config.proj_layers - 1
            self.proj = nn.ModuleList(stack(Linear(width, size, bias=False), *layers(size, more)) for width in inputs)
            self.ln = nn.ModuleList(stack(*norms(config.widths)) for _ in depths)
        self.head = nn.ModuleList(make_lm_head(config.hidden_size, vocab) for _ in depths)

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        if not self.config.scale_input:
            return feature
        return rms_norm(feature, feature.new_ones(feature.shape[-1]), EPS, out_dtype=feature.dtype) / math.sqrt(2)

    def index(self, depth: int) -> int:
        """Return which of the weights per depth are those of `depth`."""
        return 0 if self.config.tie_weights else depth

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        config, index = self.config, self.index(depth)
        scale = config.embedding_weight / config.state_weight  # the norm after the sum takes any scale of it
        before = state if depth == 0 or not config.has_gates else state[..., : config.hidden_size]
        projected = self.proj[min(depth, len(self.proj) - 1)](before)
        if not config.has_gates:
            norm, emb = self.ln[index], self.emb[index]
            if isinstance(norm, ShiftedRMSNorm) and isinstance(emb, nn.Embedding):
                return embed_norm_gelu(projected, ids, emb.weight, scale, norm.weight, norm.bias, EPS)
            return activate(norm(torch.add(projected, emb(ids), alpha=scale)), "gelu")
        embedded = torch.stack([table(ids) for table in self.emb], dim=-2)  # [..., 4, D], or [..., 1, D] if tied
        sums = torch.add(projected.unflatten(-1, (len(GATES), -1)), embedded, alpha=scale)
        forget, enter, leave = uniform(torch.sigmoid, sums[..., :-1, :]).unbind(-2)
        cell = activate(self.cell_ln[0](sums[..., -1, :]), "gelu") * enter
        if depth > 0:
            cell = state[..., config.hidden_size :] * forget + cell
        return torch.cat([activate(self.state_ln[0](cell), "gelu") * leave, cell], dim=-1)

    def readout(self, depth: int) -> Readout:
        return Readout(self.head[self.index(depth)], lambda state: state[..., : self.config.hidden_size])


def stack(first: nn.Module, *rest: nn.Module) -> nn.Module:
    return nn.Sequential(first, *rest) if rest else first


def layers(size: int, count: int) -> Iterator[nn.Module]:
    """Yield what follows an embedding or a projection."""
    for _ in range(count):
        yield from (ShiftedRMSNorm(size), nn.GELU(), Linear(size, size, bias=False))


def norms(sizes: Sequence[int]) -> Iterator[nn.Module]:
    """Yield the norm after the sum, and the layers after it."""
    yield ShiftedRMSNorm(sizes[0])
    for before, after in pairwise(sizes):
        yield from (nn.GELU(), Linear(before, after, bias=False), ShiftedRMSNorm(after))


def layout(head: Head) -> Layout:
    """Return the names of a checkpoint. Arctic's has embeddings and projections by gate, and without gates a sequence
    where we have a module alone.
    """
    names: Layout = {}
    for name, _ in head.named_parameters():
        part, index, rest = name.split(".", 2)
        if head.config.has_gates and part == "emb":
            names[name] = (f"{GATES[int(index)]}_emb.0.{rest}",)
        elif head.config.has_gates and part == "proj":
            names[name] = tuple(f"{gate}_proj.{index}.{rest}" for gate in GATES)
        elif head.config.sequences and part != "head" and "." not in rest:
            names[name] = (f"{part}.{index}.0.{rest}",)
        else:
            names[name] = (name,)
    return names


def initialize(head: Head, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Draw each matrix of a checkpoint from N(0, 1/sqrt(n)): IBM's n is the state's width, which `state_weight` and
    `embedding_weight` assume, Arctic's the matrix's smaller size.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parts in layout(head).items():
        parameter = head.get_parameter(name)
        if parameter.ndim > 1:
            smaller = min(len(parameter) // len(parts), parameter.shape[1])
            size = head.config.width if head.config.name == "mlp" else smaller
            parameter.normal_(0.0, 1 / math.sqrt(size), generator=generator)


HEAD = HeadModule(SpeculatorHead, initialize, layout=layout)
