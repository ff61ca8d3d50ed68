"""Llama-family decoder (LlamaForCausalLM): grouped-query attention, rotary embedding, gated MLP, RMSNorm.

One module both computes features for training and serves; the caller's `attention` supplies the older keys. QKV and
gate/up are stored merged; `checkpoint_layout` says which checkpoint tensors each parameter is made of. The other
families in this folder are this decoder with other options in their TargetConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts
from kernels.elementwise import rotate
from kernels.rotary import QKNorm
from models.attention import Attention, project_of
from models.config import LAST, TargetConfig
from models.fused_decoder import FusedDecoder, parts_of
from models.layers import Embedding, GatedMLP, Linear, PackedEmbedding, RMSNorm, RotaryEmbedding
from models.targets.experts import MixtureOfExperts
from models.targets.zero3 import ShardedLayers
from models.weights import merged_parts


class TargetOutput(NamedTuple):
    last_hidden: Tensor  # [..., H] before the final norm
    hidden: Tensor  # [..., H] after the final norm: the input of the LM head
    aux: tuple[Tensor, ...]  # [..., H] each, in the order of `aux_layers`


class SelfAttention(nn.Module):
    """Projections and rotary embedding around `Attention`. `input_size` differs from H in an EAGLE-3 head."""

    def __init__(self, config: TargetConfig, layer: int, *, input_size: int | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(input_size or config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.window = config.window(layer)
        self.scale = config.attention_scale
        self.rotary_dim = config.rotary_dim
        self.rotary_table = int(config.local_rope is not None and self.window is not None)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, centered=config.centered_norms)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, centered=config.centered_norms)

    @property
    def head_norm(self) -> QKNorm | None:
        if not self.qk_norm:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.centered)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention, residual: Tensor | None = None
    ) -> Tensor:
        """Return the projected output `[..., H]`, added to `residual` if there is one."""
        attended = self._attend(self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)), rotary, attention)
        return self.o_proj(attended) if residual is None else self.o_proj.add(residual, attended)

    def _attend(self, qkv: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        if self.rotary_dim is None and (project := project_of(attention)):
            return project(self.layer, qkv, rotary, self.head_norm, window=self.window, scale=self.scale)
        num_rotated = self.num_heads + self.num_kv_heads
        qk = qkv[..., :num_rotated, :]
        if self.qk_norm:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=-2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=-2)
        qk = rotate(qk, *rotary)
        q, k = qk[..., : self.num_heads, :], qk[..., self.num_heads :, :]
        v = qkv[..., num_rotated:, :]
        return attention(self.layer, q, k, v, window=self.window, scale=self.scale)


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig, layer: int, mlp: nn.Module | None = None, attention: Any = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn: SelfAttention = attention or SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp or GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), rotary, attention, x)
        return self.mlp(self.post_attention_layernorm(x), x)

    @property
    def forward_norm(self) -> RMSNorm:
        """The norm of the MLP's input."""
        return self.post_attention_layernorm

    def parts(self) -> LayerParts | None:
        """Return the weights for kernels that run whole layers; None where none can."""
        return parts_of(self.self_attn, self.mlp, self.post_attention_layernorm, input_norm=self.input_layernorm)


class LlamaTarget(nn.Module):
    """The target. Layer id j in `aux_layers` is HF's `hidden_states[j]`: the residual stream entering layer j.

    As in HF, the id num_layers, or LAST, is the stream after the final norm.
    """

    path: str = ""  # as the user gave it: a folder or a hub id
    folder: Path = Path()  # the local path of the checkpoint
    fingerprint: str = ""
    ggml_formats: tuple[str, ...] = ()  # of weights that stay in blocks as published (kernels/ggml.py)

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.end_tokens = config.eos_token_ids  # load_target adds those of generation_config.json
        self._fused_decoder = FusedDecoder()
        self.shares: ShardedLayers | None = None  # if the layers are sharded (ZeRO-3)
        self.embed_tokens: Embedding | PackedEmbedding = Embedding(config.vocab_size, config.hidden_size)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        rotated = config.rotary_dim or config.head_dim
        self.rotaries = [RotaryEmbedding(rope, rotated, config.max_position_embeddings) for rope in ropes]
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        """Read the checkpoint's config.json. Raises ValueError naming the key that is missing or not supported."""
        return TargetConfig.from_json(config)

    def make_layer(self, index: int) -> DecoderLayer:
        experts = self.config.experts
        return DecoderLayer(self.config, index, experts and MixtureOfExperts(self.config.hidden_size, experts))

    @staticmethod
    def published_name(name: str) -> str:
        """Return the name that a tensor, by Llama's name, has in checkpoints of this family."""
        return name

    def is_foreign(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to a head in it."""
        return False

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, *, aux_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the decoder on ids and positions `[...]` of one shape; `logits` projects onto the vocabulary."""
        end = len(self.layers)
        for layer in aux_layers:
            if not LAST <= layer <= end:
                raise ValueError(f"aux_layers: id {layer} is outside {LAST}..{end}")
        x = self.enter(ids, positions)
        rotary = [tables.rows(positions, x.dtype) for tables in self.rotaries]
        streams: dict[int, Tensor] = {}
        decode = self._fused_decoder.over(attention, self.layers, self.norm, packed=self.lm_head.packed is not None)
        if decode:
            entering = [index for index in range(end) if index in aux_layers]
            cos, sin = rotary[0] if len(rotary) == 1 else map(torch.stack, zip(*rotary, strict=True))
            hidden, layer_inputs = decode(x, (cos, sin), entering)
            streams.update(zip(entering, layer_inputs, strict=True))
        else:
            for index, layer in enumerate(self.layers):
                if index in aux_layers:
                    streams[index] = x
                x = layer(x, rotary[cast(DecoderLayer, layer).self_attn.rotary_table], attention)
            hidden = self.norm(x)
        if self.config.stream_scale != 1:
            streams = {index: x * self.config.stream_scale for index, x in streams.items()}
        streams[end] = streams[LAST] = hidden
        return TargetOutput(x, hidden, tuple(streams[layer] for layer in aux_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden `[..., H]` -> `[..., V]`."""
        logits, scaling = self.lm_head(hidden), self.config.logits_scaling
        return logits if scaling == 1 else logits / scaling

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """Return rows `[N, H]` of the LM head for a head that keeps a copy, with the scale of the logits."""
        return self.lm_head.weight[ids] / self.config.logits_scaling

    def join_gathers(self) -> None:
        """If the layers are sharded, join the other processes' forwards until none has any left.

        Every process calls this after work in which the number of forwards may differ between processes.
        """
        if self.shares is not None:
            self.shares.join_gathers()

    @property
    def heads(self) -> tuple[int, int, int]:
        """Numbers of query heads and KV heads, and the head size; with tensor parallelism those of this rank."""
        attention = cast(DecoderLayer, self.layers[0]).self_attn
        return attention.num_heads, attention.num_kv_heads, attention.head_dim

    @property
    def embedding_weight(self) -> Tensor:
        return self.embed_tokens.weight

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input `[..., H]`."""
        return self.embed(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the scaled embedding `[..., H]`."""
        x, factor = self.embed_tokens(ids), self.config.embedding_scale
        return x if factor == 1 else x * factor

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        """Return parameter name -> the HF tensor names that are concatenated along dim 0 to make it."""
        names = {name: name if name.startswith("lm_head") else f"model.{name}" for name, _ in self.named_parameters()}
        return {name: tuple(map(self.published_name, merged_parts(full))) for name, full in names.items()}
