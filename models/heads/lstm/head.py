"""LSTM speculator (Arctic Inference, Snowflake): an MLP speculator whose state passes the gates of an LSTM.

At every depth, from token x, state s (at depth 0 the target's hidden state) and cell c (at depth 0 none), with α that
of an MLP speculator: f, i, o = σ(W s + α E(x)); c = f c + i GELU(norm(W s + α E(x))); s = o GELU(norm(c)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from kernels.elementwise import activate, uniform
from models.attention import Attention
from models.heads.base import Head, Readout
from models.heads.lstm.config import LstmConfig
from models.heads.mlp.head import ShiftedRMSNorm, SpeculatorHead, input_sizes
from models.heads.weights import HeadModule, Layout
from models.layers import Embedding, Linear, make_lm_head
from models.targets.llama import LlamaTarget

GATES = ("forget", "input", "output", "cell")  # the last one's activation is another


class LstmHead(SpeculatorHead):
    """`sum_lstm`: `emb` holds an embedding for each of GATES, or one for all; each of `proj`, of the first depth and of
    the others, is the projections of all gates in one. Its state is the LSTM's, and the cell after it.

    `sum_rnn`: lists as of an MLP speculator, of modules that may have several layers.
    """

    config: LstmConfig

    def __init__(self, config: LstmConfig) -> None:
        super().__init__()
        self.config = config
        size, depths = config.width, range(config.depths)
        if config.has_gates:
            embeddings = 1 if config.tie_lstm_embs else len(GATES)
            inputs = (config.target_hidden_size, size)
            self.emb = nn.ModuleList(Embedding(config.vocab_size, size) for _ in range(embeddings))
            self.proj = nn.ModuleList(Linear(width, len(GATES) * size, bias=False) for width in inputs)
            self.cell_ln, self.state_ln = (nn.ModuleList([ShiftedRMSNorm(size)]) for _ in range(2))
        else:
            self.emb = nn.ModuleList(
                nn.Sequential(Embedding(config.vocab_size, size), *layers(size, config.emb_layers - 1)) for _ in depths
            )
            self.proj = nn.ModuleList(
                nn.Sequential(Linear(width, size, bias=False), *layers(size, config.proj_layers - 1))
                for width in input_sizes(config)
            )
            self.ln = nn.ModuleList(nn.Sequential(*norms(config.inner_dim)) for _ in depths)
        self.head = nn.ModuleList(make_lm_head(config.hidden_size, config.vocab_size) for _ in depths)

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        index, scale = self.index(depth), self.embedding_scale
        if not self.config.has_gates:
            summed = torch.add(self.projected(state, depth), self.emb[index](ids), alpha=scale)
            return activate(self.ln[index](summed), "gelu")
        before, cell = (state, None) if depth == 0 else state.chunk(2, dim=-1)
        embedded = torch.stack([table(ids) for table in self.emb], dim=-2)  # [..., 4, D], or [..., 1, D] if tied
        sums = torch.add(self.projected(before, depth).unflatten(-1, (len(GATES), -1)), embedded, alpha=scale)
        forget, enter, leave = uniform(torch.sigmoid, sums[..., :-1, :]).unbind(-2)
        candidate = activate(self.cell_ln[0](sums[..., -1, :]), "gelu") * enter
        cell = candidate if cell is None else cell * forget + candidate
        return torch.cat([activate(self.state_ln[0](cell), "gelu") * leave, cell], dim=-1)

    def readout(self, depth: int) -> Readout:
        return Readout(self.head[self.index(depth)], lambda state: state[..., : self.config.hidden_size])


def layers(size: int, count: int) -> Iterator[nn.Module]:
    """Yield what follows an embedding or a projection."""
    for _ in range(count):
        yield from (ShiftedRMSNorm(size), nn.GELU(), Linear(size, size, bias=False))


def norms(sizes: tuple[int, ...]) -> Iterator[nn.Module]:
    """Yield the norm after the sum, and the layers after it."""
    yield ShiftedRMSNorm(sizes[0])
    for before, after in pairwise(sizes):
        yield from (nn.GELU(), Linear(before, after, bias=False), ShiftedRMSNorm(after))


def layout(head: Head) -> Layout:
    """Return the names of a checkpoint, which has embeddings and projections by gate."""
    names: Layout = {}
    for name, _ in head.named_parameters():
        part, index, rest = name.split(".", 2)
        if head.config.has_gates and part == "emb":
            names[name] = (f"{GATES[int(index)]}_emb.0.{rest}",)
        elif head.config.has_gates and part == "proj":
            names[name] = tuple(f"{gate}_proj.{index}.{rest}" for gate in GATES)
        else:
            names[name] = (name,)
    return names


def initialize(head: Head, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Draw each matrix of a checkpoint from N(0, 1/sqrt(n)), n its smaller size, as Arctic does."""
    assert not from_target, "it starts from nothing of the target's"
    generator = torch.Generator().manual_seed(seed)
    for name, parts in layout(head).items():
        parameter = head.get_parameter(name)
        if parameter.ndim > 1:
            smaller = min(len(parameter) // len(parts), parameter.shape[1])
            parameter.normal_(0.0, 1 / math.sqrt(smaller), generator=generator)


HEAD = HeadModule(LstmHead, initialize, layout=layout)
