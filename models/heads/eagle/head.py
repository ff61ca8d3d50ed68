"""EAGLE-1 head (arXiv 2401.15077): predicts the target's next final hidden state, and applies the target's LM head.

A step takes, at slot i, the embedding of token t[i+1] and the feature f[i]: the target's hidden state after the final
norm or, deeper in a draft, the head's previous output. One decoder layer without input norm computes f[i+1]. The LM
head is borrowed from the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts
from kernels.draft import DraftParts
from models.attention import Attention
from models.decoder import FusedDecoder, SelfAttention, draft_parts_of, parts_of
from models.heads.base import Readout, RecurrentHead
from models.heads.borrowing import Borrowed
from models.heads.config import EMBEDDING, DecoderShape
from models.heads.eagle.config import EagleConfig
from models.heads.weights import HeadModule, draw_matrices
from models.layers import Embedding, GatedMLP, Linear, RMSNorm, RotaryEmbedding
from models.targets.llama import LlamaTarget


class EagleLayer(nn.Module):
    """A decoder layer without an input norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        self.self_attn = SelfAttention(layer, 0)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = GatedMLP(layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = self.self_attn(x, rotary, attention, x)
        return self.mlp(self.post_attention_layernorm(x), x)

    def parts(self) -> LayerParts | None:
        """Return the weights for kernels that run whole layers; None where none can."""
        return parts_of(self.self_attn, self.mlp, self.post_attention_layernorm)


class FeatureHead(RecurrentHead):
    """A head of decoder layers whose states are like the target's last hidden state, which its LM head reads."""

    config: DecoderShape

    def __init__(self, config: DecoderShape) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.rotary = RotaryEmbedding(layer.rope, layer.rotary_dim or layer.head_dim, layer.max_position_embeddings)
        self.borrowed = Borrowed()
        self._fused_decoder = FusedDecoder()

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        return feature

    def readout(self, depth: int) -> Readout:
        return Readout(self.borrowed.lm_head)


class EagleHead(FeatureHead):
    config: EagleConfig

    keeps_rows = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        layer = config.layer
        if config.own_embedding:
            self.embed_tokens = Embedding(layer.vocab_size, layer.hidden_size)
            self.embed_tokens.weight.requires_grad_(False)
        self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        embedded = self.embed_tokens(ids) if self.config.own_embedding else self.borrowed.embed(ids)
        x = torch.cat([embedded.to(state.dtype), state], dim=-1)
        x, rotary = self.fc(x).to(state.dtype), self.rotary.rows(positions, state.dtype)
        decode = self._fused_decoder.over(attention, self.layers, None, packed=self.fc.packed is not None)
        return decode(x, rotary)[0] if decode else self.layers[0](x, rotary, attention)

    def draft_parts(self) -> DraftParts | None:
        decoder = self._fused_decoder.decoder(self.layers, None, packed=self.fc.packed is not None)
        embedding = self.embed_tokens if self.config.own_embedding else self.borrowed.embedding
        return draft_parts_of(self, decoder, embedding, self.borrowed.lm_head, joined=self.fc.packed)


def initialize(head: EagleHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Initialize at random; with `from_target`, fc repeats the feature and the layer's small weights add little."""
    draw_matrices(head, seed, but=EMBEDDING)
    if head.config.own_embedding:
        head.embed_tokens.weight.copy_(target.embedding_weight)
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    if from_target:
        size = head.config.hidden_size
        head.fc.weight[:, size:].copy_(torch.eye(size))


HEAD = HeadModule(EagleHead, initialize)
