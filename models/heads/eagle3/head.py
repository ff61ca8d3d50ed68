"""EAGLE-3 head (arXiv 2503.01840): one or more decoder layers over fused hidden states of the target.

A step takes, at slot i, the embedding of token t[i+1] and a state: the fused features f[i] of the target or, deeper in
a draft, the head's previous output. It returns the next state, from which `logits` computes the logits of t[i+2] over
the draft vocabulary. Rotary position i is the feature's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts
from kernels.draft import DraftParts
from kernels.elementwise import norm_beside
from models.attention import Attention, Rotary
from models.decoder import DecoderLayer, FusedDecoder, SelfAttention, draft_parts_of, parts_of
from models.heads.base import Head, Readout, RecurrentHead
from models.heads.config import EMBEDDING
from models.heads.eagle3.config import Eagle3Config
from models.heads.weights import HeadModule, draw_matrices, start_at_random
from models.layers import Embedding, GatedMLP, Linear, RMSNorm, RotaryEmbedding, make_lm_head
from models.targets.llama import LlamaTarget


class Eagle3FirstLayer(nn.Module):
    """The layer that reads token and state: attention over their concatenation, residual from the state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(config.layer, 0, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.layer.intermediate_size, bias=config.layer.mlp_bias)

    def forward(self, embedding: Tensor, state: Tensor, rotary: Rotary, attention: Attention, reach: int) -> Tensor:
        token, hidden = self.input_layernorm, self.hidden_norm
        x = norm_beside(embedding, state, token.weight, hidden.weight, token.eps)
        residual = x[..., state.shape[-1] :] if self.norm_before_residual else state
        x = self.self_attn(x, rotary, attention, residual, reach)
        return self.mlp(self.post_attention_layernorm(x), x)

    def parts(self) -> LayerParts | None:
        """Return the weights for kernels that run whole layers; None where none can."""
        return parts_of(
            self.self_attn,
            self.mlp,
            self.post_attention_layernorm,
            input_norm=self.hidden_norm,
            token_norm=self.input_layernorm,
            residual_normed=self.norm_before_residual,
        )


class Eagle3Layers(Head):
    """EAGLE-3's modules. Buffers map vocabularies: `d2t` int64 [Vd], target id - draft id, and `t2d` bool [V]."""

    # A drafted row sees its slot's window and the rows in between; otherwise its window is counted from its position.
    from_slot: ClassVar[bool] = False
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer, fused = config.layer, config.target_hidden_size * len(config.aux_layers)
        self.embed_tokens = Embedding(layer.vocab_size, layer.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.embed_requires_grad)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, layer.rms_norm_eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, layer.rms_norm_eps) for _ in config.aux_layers)
            self.fc_norm = nn.ModuleList(norms)
        self.fc = Linear(fused, layer.hidden_size, bias=False)
        self._fused_decoder = FusedDecoder()
        self.rotary = RotaryEmbedding(layer.rope, layer.head_dim, layer.max_position_embeddings)
        rest = (DecoderLayer(layer, index) for index in range(1, layer.num_layers))
        self.layers = nn.ModuleList([Eagle3FirstLayer(config), *rest])
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = make_lm_head(layer.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(layer.vocab_size, dtype=torch.bool)
        t2d[: config.draft_vocab_size].fill_(True)
        self.register_buffer("t2d", t2d)

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        assert len(aux) == len(self.config.aux_layers), "one feature per aux layer"
        if self.config.fc_norm:
            aux = [norm(feature) for norm, feature in zip(self.fc_norm, aux, strict=True)]
        fused = torch.cat(list(aux), dim=-1)
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused)

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        """Compute the next state, pre-norm, or post-norm with norm_output. All depths use the same weights."""
        embedding = self.embed_tokens(ids).to(state.dtype)
        rotary, reach = self.rotary.rows(positions, state.dtype), depth if self.from_slot else 0
        norm = self.norm if self.config.norm_output else None
        decode = self._fused_decoder.over(attention, self.layers, norm, packed=self.fc.packed is not None)
        if decode:
            return decode(state.clone(), rotary, tokens=embedding, reach=reach)[0]
        first, *rest = self.layers
        x = first(embedding, state, rotary, attention, reach)
        for layer in rest:
            x = layer(x, rotary, attention, reach)
        return x if norm is None else norm(x)

    def readout(self, depth: int) -> Readout:
        return Readout(self.lm_head) if self.config.norm_output else Readout(self.lm_head, self.norm)


class Eagle3Head(Eagle3Layers, RecurrentHead):
    from_slot = True

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.keeps_rows = len(self.layers) == 1

    def draft_parts(self) -> DraftParts | None:
        final, before = (self.norm, None) if self.config.norm_output else (None, self.norm.weight)
        decoder = self._fused_decoder.decoder(self.layers, final, packed=self.fc.packed is not None)
        return draft_parts_of(self, decoder, self.embed_tokens, self.lm_head, norm=before, from_slot=self.from_slot)


def initialize(head: Eagle3Layers, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Copy the target's embedding; with `from_target` also start from its last layer, final norm and LM head.

    Call after `set_vocabulary` (the LM head takes the rows of the draft vocabulary) and before the target is
    packed. The fused state starts as the last aux feature; the embedding's half of the QKV input starts
    random, as the rest does without `from_target` and in a head of other sizes.
    """
    size = head.config.layer.hidden_size
    same_width = size == target.config.hidden_size
    draw_matrices(head, seed, but=EMBEDDING if same_width else None)
    if same_width:
        head.embed_tokens.weight.copy_(target.embedding_weight)
    if not from_target:
        return
    donor, first = target.attention_layers[-1], cast(Eagle3FirstLayer, head.layers[0])
    attention, mlp = first.self_attn, first.mlp
    sizes = size, head.config.layer.intermediate_size
    alike = target.config.latent is None  # else the target's attention is of another kind, and the head's stays random
    if sizes != (target.config.hidden_size, target.config.intermediate_size) or (
        alike
        and (
            attention.qkv_proj.weight.shape[0] != donor.self_attn.qkv_weight.shape[0]
            or attention.o_proj.weight.shape != donor.self_attn.o_proj.weight.shape
        )
    ):
        return start_at_random()
    head.lm_head.weight.copy_(target.lm_head_rows(head.target_ids))
    head.norm.weight.copy_(target.norm.scale)
    head.fc.weight[:, -size:].copy_(torch.eye(size))
    if alike:
        attention.qkv_proj.weight[:, size:].copy_(donor.self_attn.qkv_weight)
        attention.o_proj.weight.copy_(donor.self_attn.o_proj.weight)
    if isinstance(donor.mlp, GatedMLP):  # not a mixture of experts
        mlp.load_state_dict(donor.mlp.state_dict())
    first.hidden_norm.weight.copy_(donor.input_layernorm.scale)
    first.post_attention_layernorm.weight.copy_(donor.forward_norm.scale)


HEAD = HeadModule(Eagle3Head, initialize)
