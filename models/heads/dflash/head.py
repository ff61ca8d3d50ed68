"""DFlash head (arXiv 2602.06036): a few Qwen3-style layers that draft a block of tokens in one forward.

The target's features enter as keys and values only: every layer projects the fused features of the context with its
own K and V projections. Queries come from the block's rows, whose inputs are rows of the target's embedding. Embedding
and LM head are the target's and are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kernels.elementwise import rotate
from kernels.weights.quantize import WeightFormat
from models.attention import Attention, WriteKeys
from models.decoder import DecoderLayer, FusedDecoder
from models.heads.base import Readout
from models.heads.block import Attend, BlockHead
from models.heads.borrowing import Borrowed
from models.heads.dflash.config import DFlashConfig
from models.heads.weights import HeadModule, draw_matrices, pack_layers, start_at_random
from models.layers import GatedMLP, Linear, RMSNorm, RotaryEmbedding, make_lm_head
from models.targets.llama import LlamaTarget

Rotary = tuple[Tensor, Tensor]  # cos and sin


class DFlashHead(BlockHead):
    """With a reduced draft vocabulary `lm_head` holds a frozen copy of the target's rows, and `d2t`, `t2d` its maps."""

    config: DFlashConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.fc = Linear(len(config.aux_layers) * config.target_hidden_size, layer.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.rotary = RotaryEmbedding(layer.rope, layer.head_dim, layer.max_position_embeddings)
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(layer.num_layers))
        for module, causal in zip(self.layers, config.causal_layers, strict=True):
            attention = cast(DecoderLayer, module).self_attn
            if attention.window is not None and not causal:  # the kernels' windows count the block's rows as well
                attention.window += config.block_size
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self._fused_decoder = FusedDecoder()
        self.context_proj: Linear | None = None  # packed: K and V projections of all layers
        self.borrowed = Borrowed()
        self.reduced = config.draft_vocab_size < layer.vocab_size
        if self.reduced:
            self.lm_head = make_lm_head(layer.hidden_size, config.draft_vocab_size)
            self.lm_head.weight.requires_grad_(False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            t2d = torch.zeros(layer.vocab_size, dtype=torch.bool)
            t2d[: config.draft_vocab_size].fill_(True)
            self.register_buffer("t2d", t2d)

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        assert len(aux) == len(self.config.aux_layers), "one feature per aux layer"
        features = torch.cat(list(aux), dim=-1)
        return self.hidden_norm(self.fc(features).to(features.dtype))  # under autocast fc returns bf16

    def write_context(self, state: Tensor, positions: Tensor, write: WriteKeys) -> None:
        rotary, layer = self.rotary.rows(positions, state.dtype), self.config.layer
        projected = None
        if self.context_proj is not None:
            projected = self.context_proj(state).unflatten(-1, (layer.num_layers, 2 * layer.num_kv_heads, -1))
        for index, module in enumerate(self.layers):
            attention = cast(DecoderLayer, module).self_attn
            if projected is None:
                kv = attention.qkv_proj(state).unflatten(-1, (-1, layer.head_dim))[..., layer.num_heads :, :]
            else:
                kv = projected[..., index, :, :]
            k, v = kv.chunk(2, dim=-2)
            write(index, rotate(attention.k_norm(k.contiguous()), *rotary), v)

    def make_layer(self, index: int) -> nn.Module:
        return DecoderLayer(self.config.layer, index)

    def run_layer(self, layer: nn.Module, x: Tensor, rotary: Rotary, attention: Attention, rows: int) -> Tensor:
        return layer(x, rotary, attention)

    def block_states(self, ids: Tensor, positions: Tensor, attend: Attend, rows: int) -> Tensor:
        """Return the states after the final norm."""
        x, kinds = self.borrowed.embed(ids), self.config.causal_layers
        rotary = self.rotary.rows(positions, x.dtype)
        attentions = {causal: attend(causal) for causal in set(kinds)}
        if len(attentions) == 1:
            packed = self.fc.packed is not None
            decode = self._fused_decoder.over(attentions[kinds[0]], self.layers, self.norm, packed=packed)
            if decode:
                return decode(x, rotary, block=rows)[0]
        for module, causal in zip(self.layers, kinds, strict=True):
            x = self.run_layer(module, x, rotary, attentions[causal], rows)
        return self.norm(x)

    def readout(self, depth: int) -> Readout:
        return Readout(self.lm_head if self.reduced else self.borrowed.lm_head)


def decoder_layers(head: DFlashHead) -> list[DecoderLayer]:
    return [cast(DecoderLayer, layer) for layer in head.layers]


def pack(head: DFlashHead, *, exact: bool, weight_format: WeightFormat) -> None:
    """Pack the linear layers, and once more the K and V projections: the context needs them without the queries."""
    layer = head.config.layer
    queries = layer.num_heads * layer.head_dim
    weights = [module.self_attn.qkv_proj for module in decoder_layers(head)]
    projection = Linear(layer.hidden_size, 1, bias=layer.attention_bias, device="meta")
    projection.weight = nn.Parameter(torch.cat([linear.weight[queries:] for linear in weights]).detach(), False)
    if layer.attention_bias:
        projection.bias = nn.Parameter(torch.cat([linear.bias[queries:] for linear in weights]).detach(), False)
    projection.pack(exact=exact, weight_format=weight_format, quantize_rows=True)
    pack_layers(head, exact=exact, weight_format=weight_format)
    head.context_proj = projection


def initialize(head: DFlashHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Initialize at random; with `from_target` the layers are the target's last ones.

    The fused state then starts as the last feature, and queries and keys, which the target may not norm, get the
    size that they have there for inputs of unit variance. Layers of other sizes stay random.
    """
    draw_matrices(head, seed)
    if head.reduced:
        head.lm_head.weight.copy_(target.lm_head_rows(head.target_ids))
    if not from_target:
        return
    size, donors = head.config.hidden_size, target.attention_layers[-len(head.layers) :]
    if (
        target.config.latent is not None
        or len(donors) < len(head.layers)
        or any(
            one.self_attn.qkv_proj.weight.shape != other.self_attn.qkv_weight.shape
            or one.self_attn.o_proj.weight.shape != other.self_attn.o_proj.weight.shape
            for one, other in zip(decoder_layers(head), donors, strict=True)
        )
    ):
        return start_at_random()
    for layer, donor in zip(decoder_layers(head), donors, strict=True):
        copy_layer(layer, donor)
    head.fc.weight[:, -size:].copy_(torch.eye(size))
    head.hidden_norm.weight.copy_(donors[-1].input_layernorm.scale)
    head.norm.weight.copy_(target.norm.scale)


def copy_layer(layer: DecoderLayer, donor: DecoderLayer) -> None:
    """Copy a target's layer of the same sizes; an MLP of another kind or size stays as it is."""
    attention, source = layer.self_attn, donor.self_attn
    scale = donor.input_layernorm.scale
    attention.qkv_proj.weight.copy_(source.qkv_weight)
    attention.o_proj.weight.copy_(source.o_proj.weight)
    layer.input_layernorm.weight.copy_(scale)
    layer.post_attention_layernorm.weight.copy_(donor.forward_norm.scale)
    mlp, other = cast(GatedMLP, layer.mlp), donor.mlp
    if isinstance(other, GatedMLP) and other.down_proj.weight.shape == mlp.down_proj.weight.shape:
        mlp.load_state_dict(other.state_dict())
    if source.qk_norm:
        attention.q_norm.weight.copy_(source.q_norm.scale)
        attention.k_norm.weight.copy_(source.k_norm.scale)
        return
    rows = (source.qkv_weight * scale).square().sum(1)  # variance of each output for inputs of unit variance
    queries, keys = source.num_heads * source.head_dim, source.num_kv_heads * source.head_dim
    attention.q_norm.weight.fill_(float(rows[:queries].mean().sqrt()))
    attention.k_norm.weight.fill_(float(rows[queries : queries + keys].mean().sqrt()))


HEAD = HeadModule(DFlashHead, initialize, pack)
