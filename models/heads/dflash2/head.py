"""DFlash2 head (z-lab, 2026): DFlash, whose rows read the row before them, and whose tokens are chosen as a path.

Every sublayer's input and output pass through a convolution with two taps along the block's rows; its kernel depends on
the row's input. The candidate selector adds to the logits of a row's best tokens a score of each after the token that
was chosen before; all other tokens are ruled out.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention
from models.heads.dflash.head import DFlashHead, Rotary
from models.heads.dflash2.config import TAPS, DFlash2Config
from models.layers import Linear
from models.targets.llama import DecoderLayer, LlamaTarget

INPUT, OUTPUT = 0, 1  # sides of a sublayer


class BlockConvolution(nn.Module):
    """`base_kernel` `[sides, taps, H]`; `kernel_projection` yields what is added to it for each group of channels."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, size))
        self.kernel_projection = Linear(size, 2 * TAPS * size // group, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the kernels `[..., sides, taps, H]` for the normed input x `[..., H]` of a sublayer."""
        delta = self.kernel_projection(x).unflatten(-1, (2, TAPS, -1))
        return self.base_kernel + delta.repeat_interleave(self.group, dim=-1)


def convolve(z: Tensor, kernels: Tensor, side: int, rows: int) -> Tensor:
    """Return the convolution of z `[..., H]`, blocks of `rows` rows each, before the first of which there is zero."""
    before = F.pad(z.reshape(-1, rows, z.shape[-1])[:, :-1], (0, 0, 1, 0)).view(z.shape)
    return kernels[..., side, 0, :] * z + kernels[..., side, 1, :] * before


class DFlash2Layer(DecoderLayer):
    def __init__(self, config: DFlash2Config, index: int) -> None:
        super().__init__(config.layer, index)
        self.attention_conv = BlockConvolution(config.hidden_size, config.conv_group_size)
        self.mlp_conv = BlockConvolution(config.hidden_size, config.conv_group_size)

    def run(self, x: Tensor, rotary: Rotary, attention: Attention, rows: int) -> Tensor:
        normed = self.input_layernorm(x)
        kernels = self.attention_conv(normed)
        attended = self.self_attn(convolve(normed, kernels, INPUT, rows), rotary, attention)
        normed, x = self.post_attention_layernorm.add(x, convolve(attended, kernels, OUTPUT, rows))
        kernels = self.mlp_conv(normed)
        return x + convolve(self.mlp(convolve(normed, kernels, INPUT, rows)), kernels, OUTPUT, rows)

    def parts(self) -> None:
        """No kernel runs such a layer whole."""


class CandidateSelector(nn.Module):
    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab_size, config.selector_rank))
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, bias=False)

    def query(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the query `[..., r]` of rows with states `[..., H]` after the tokens `before` `[...]`."""
        return F.embedding(before, self.predecessor_codebook).to(states.dtype) * self.hidden_projection(states)

    def scores(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores `[..., K]` of the draft ids `candidates` `[..., K]`."""
        successors = F.embedding(candidates, self.successor_codebook).to(query.dtype)
        return (successors @ query[..., None]).squeeze(-1)


class DFlash2Head(DFlashHead):
    """A depth's state is the row's state and the selector's query."""

    corrects = True

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def make_layer(self, index: int) -> nn.Module:
        return DFlash2Layer(self.config, index)

    def run_layer(self, layer: nn.Module, x: Tensor, rotary: Rotary, attention: Attention, rows: int) -> Tensor:
        return cast(DFlash2Layer, layer).run(x, rotary, attention, rows)

    def loose_parameters(self) -> list[str]:
        return [f"candidate_selector.{name}" for name, _ in self.candidate_selector.named_parameters(recurse=False)]

    def slot_state(self, states: Tensor, before: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([states, self.candidate_selector.query(states, before)], dim=-1), carried

    def candidate_scores(self, logits: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best draft ids of the LM head's logits `[..., Vd]`, and their scores, `[..., K]` each."""
        best = logits.topk(self.config.selector_top_k, dim=-1)
        query = state[..., self.config.hidden_size :]
        return best.indices, best.values + self.candidate_selector.scores(query, best.indices)

    def corrected(self, logits: Tensor, state: Tensor) -> Tensor:
        candidates, scores = self.candidate_scores(logits, state)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores.to(logits.dtype))

    @torch.no_grad()
    def initialise(self, target: LlamaTarget, *, from_target: bool, seed: int = 0) -> None:
        """As DFlash's; convolutions start as the identity, and the selector's scores at zero."""
        super().initialise(target, from_target=from_target, seed=seed)
        self.candidate_selector.successor_codebook.zero_()
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.kernel_projection.weight.zero_()
                module.base_kernel[:, 0] = 1
                module.base_kernel[:, 1] = 0


HEAD = DFlash2Head
