"""DFlash2 head (z-lab, 2026): DFlash, whose rows read the row before them, and whose tokens are chosen as a path.

Every sublayer's input and output pass through a convolution with two taps along the block's rows; its kernel depends on
the row's input. The candidate selector adds to the logits of a row's best tokens a score of each after the token that
was chosen before; all other tokens are ruled out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.convolution import INPUT, OUTPUT, two_taps
from kernels.decoder import Convolution, LayerParts
from kernels.operands import Transition
from models.attention import Attention
from models.decoder import DecoderLayer
from models.heads.block import Corrector
from models.heads.dflash import head as dflash
from models.heads.dflash2.config import TAPS, DFlash2Config
from models.heads.weights import HeadModule
from models.layers import Linear
from models.targets.llama import LlamaTarget


class BlockConvolution(nn.Module):
    """`base_kernel` `[sides, taps, H]`; `kernel_projection` yields what is added to it for each group of channels."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, size))
        self.kernel_projection = Linear(size, 2 * TAPS * size // group, bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        """Convolve the normed input x `[..., H]` of a sublayer and its output, in blocks of `rows` rows each."""
        deltas = self.kernel_projection(x)
        out = sublayer(two_taps(x, self.base_kernel, deltas, INPUT, rows))
        return two_taps(out, self.base_kernel, deltas, OUTPUT, rows)

    def parts(self) -> Convolution | None:
        packed = self.kernel_projection.packed
        return None if packed is None else Convolution(self.base_kernel, packed)


class DFlash2Layer(DecoderLayer):
    def __init__(self, config: DFlash2Config, index: int) -> None:
        super().__init__(config.layer, index)
        self.attention_conv = BlockConvolution(config.hidden_size, config.conv_group_size)
        self.mlp_conv = BlockConvolution(config.hidden_size, config.conv_group_size)

    def run(self, x: Tensor, rotary: dflash.Rotary, attention: Attention, rows: int) -> Tensor:
        def attend(z: Tensor) -> Tensor:
            return self.self_attn(z, rotary, attention)

        attended = self.attention_conv(self.input_layernorm(x), attend, rows)
        normed, x = self.post_attention_layernorm.add(x, attended)
        return x + self.mlp_conv(normed, self.mlp, rows)

    def parts(self) -> LayerParts | None:
        convolutions = self.attention_conv.parts(), self.mlp_conv.parts()
        if (parts := super().parts()) is None or None in convolutions:
            return None
        return parts._replace(attention_conv=convolutions[0], mlp_conv=convolutions[1])


class CandidateSelector(nn.Module, Corrector):
    """A depth's state is the row's state and the query."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.config = config
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab_size, config.selector_rank))
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, bias=False)

    def num_candidates(self, configured: int) -> int:
        return self.config.selector_top_k

    def walk(self, states: Tensor, before: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        query = F.embedding(before, self.predecessor_codebook).to(states.dtype) * self.hidden_projection(states)
        return torch.cat([states, query], dim=-1), carried

    def corrected(self, logits: Tensor, state: Tensor) -> Tensor:
        best = logits.topk(self.config.selector_top_k, dim=-1)
        scores = best.values + self.scores(state, best.indices)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, scores.to(logits.dtype))

    def transition(self, states: Tensor) -> Transition:
        return Transition(self.successor_codebook, self.predecessor_codebook, self.hidden_projection(states))

    def query(self, state: Tensor) -> Tensor:
        return state[..., self.config.hidden_size :]

    def scores(self, state: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores `[..., K]` of the draft ids `candidates` `[..., K]` in states `[..., S']`."""
        query = self.query(state)
        successors = F.embedding(candidates, self.successor_codebook).to(query.dtype)
        return (successors @ query[..., None]).squeeze(-1)


class DFlash2Head(dflash.DFlashHead):
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    @property
    def corrector(self) -> CandidateSelector:
        return self.candidate_selector

    def make_layer(self, index: int) -> nn.Module:
        return DFlash2Layer(self.config, index)

    def run_layer(self, layer: nn.Module, x: Tensor, rotary: dflash.Rotary, attention: Attention, rows: int) -> Tensor:
        return cast(DFlash2Layer, layer).run(x, rotary, attention, rows)


def initialize(head: DFlash2Head, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """As DFlash's; convolutions start as the identity, and the selector's scores at zero."""
    dflash.initialize(head, target, from_target=from_target, seed=seed)
    head.candidate_selector.successor_codebook.zero_()
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            module.kernel_projection.weight.zero_()
            module.base_kernel[:, 0] = 1
            module.base_kernel[:, 1] = 0


HEAD = HeadModule(DFlash2Head, initialize, dflash.pack)
