"""Llama-family decoder (LlamaForCausalLM): grouped-query attention, rotary embedding, gated MLP, RMSNorm.

One module both computes features for training and serves; the caller's `attention` supplies the older keys. QKV and
gate/up are stored merged; `checkpoint_layout` says which checkpoint tensors each parameter is made of. The other
families in this folder are this decoder with other options in their TargetConfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from models.attention import Attention
from models.config import LAST, UNNORMED, TargetConfig
from models.decoder import DecoderLayer, FusedDecoder
from models.layers import Embedding, Linear, PackedEmbedding, RMSNorm, RotaryEmbedding, Unrotated, make_lm_head
from models.targets.experts import MixtureOfExperts
from models.targets.zero3 import ShardedLayers
from models.weights import merged_parts


class TargetOutput(NamedTuple):
    hidden: Tensor  # [..., H] after the final norm: the input of the LM head
    aux: tuple[Tensor, ...]  # [..., H] each, in the order of `aux_layers`, in the model's dtype


class LlamaTarget(nn.Module):
    """The target. Layer id j in `aux_layers` is HF's `hidden_states[j]`: the residual stream entering layer j.

    The id num_layers, or UNNORMED, is the stream entering the final norm, as in vLLM; LAST is that after it, as in HF.

    In 16 bits the residual stream is fp32: the output projections add their sums unrounded, and a norm rounds once, to
    the input of the next product. What heads read of it is rounded too, to the model's dtype.
    """

    renamed: ClassVar[Mapping[str, str]] = {}  # patterns of Llama's names and ours -> those of the family's files

    path: str = ""  # as the user gave it: a folder or a hub id
    folder: Path = Path()  # the local path of the checkpoint
    fingerprint: str = ""
    unread: tuple[str, ...] = ()  # prefixes of a checkpoint's tensors that are of another part of the model
    ggml_formats: tuple[str, ...] = ()  # of weights that stay in blocks as published (kernels/weights/ggml.py)

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config, self.recurrent = config, config.recurrent  # the latter of this rank, where ranks divide it
        self.end_tokens = config.eos_token_ids  # load_target adds those of generation_config.json
        self._fused_decoder = FusedDecoder()
        self.shares: ShardedLayers | None = None  # if the layers are sharded (ZeRO-3)
        self.embed_tokens: Embedding | PackedEmbedding = Embedding(config.vocab_size, config.hidden_size)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        rotated = config.rotary_dim or config.head_dim
        rotary = Unrotated if config.unrotated else RotaryEmbedding
        self.rotaries = [rotary(rope, rotated, config.max_position_embeddings) for rope in ropes]
        self.layers = nn.ModuleList(self.make_layer(config, index) for index in range(config.num_layers))
        for name, module in self.layers.named_modules():
            if isinstance(module, Linear) and name.endswith(("o_proj", "down_proj")):
                module.out_dtype = torch.float32
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.lm_head = make_lm_head(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        """Read the checkpoint's config.json. Raises ValueError naming the key that is missing or not supported."""
        return TargetConfig.from_json(config)

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        return DecoderLayer(config, index, config.experts and MixtureOfExperts(config.hidden_size, config.experts))

    @classmethod
    def published_name(cls, name: str) -> str:
        """Return the name that a tensor, by Llama's name, has in checkpoints of this family."""
        for ours, theirs in cls.renamed.items():
            name = re.sub(ours, theirs, name)
        return name

    def stored_rows(self, name: str) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the tensors of the layout that a checkpoint's tensor `name` consists of, in another order.

        Each with the ranges of rows, first and last + 1, that make it; of most tensors none.
        """
        return {}

    def as_stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the layout as checkpoints store them, the inverse of reading them."""
        return tensors

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, *, aux_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the decoder on ids and positions `[...]` of one shape; `logits` projects onto the vocabulary."""
        end = len(self.layers)
        for layer in aux_layers:
            if not UNNORMED <= layer <= end:
                raise ValueError(f"aux_layers: id {layer} is outside {UNNORMED}..{end}")
        x, streams = self.enter(ids, positions), dict[int, Tensor]()
        dtype, scale = self.norm.weight.dtype, self.config.stream_scale
        rotary = [tables.rows(positions, dtype) for tables in self.rotaries]
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
                x = layer(x, rotary[cast(DecoderLayer, layer).rotary_table], attention)
            hidden = self.norm(x)
        streams[UNNORMED] = streams[end] = x
        read = {layer: streams[layer] for layer in aux_layers if layer != LAST}
        features = {layer: (x if scale == 1 else x * scale).to(dtype) for layer, x in read.items()}
        features[LAST] = hidden
        return TargetOutput(hidden, tuple(features[layer] for layer in aux_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden `[..., H]` -> `[..., V]`."""
        logits, scaling = self.lm_head(hidden), self.config.logits_scaling
        return logits if scaling == 1 else logits / scaling

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """Return rows `[N, H]` of the LM head for a head that keeps a copy, with the scale of the logits."""
        return self.lend()[0].weight[ids] / self.config.logits_scaling

    def lend(self) -> tuple[Linear, Tensor | PackedEmbedding]:
        """Return LM head and embedding, of H numbers each, for heads that use them in place."""
        embedding = self.embed_tokens
        return self.lm_head, embedding if isinstance(embedding, PackedEmbedding) else embedding.weight

    def join_gathers(self) -> None:
        """If the layers are sharded, join the other processes' forwards until none has any left.

        Every process calls this after work in which the number of forwards may differ between processes.
        """
        if self.shares is not None:
            self.shares.join_gathers()

    @property
    def attention_layers(self) -> list[DecoderLayer]:
        """The layers that have attention, all of them but in hybrids. Heads may start from the last ones."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Numbers of query heads and KV heads, and the head size; with tensor parallelism those of this rank."""
        attention = self.attention_layers[0].self_attn
        return attention.num_heads, attention.num_kv_heads, attention.head_dim

    @property
    def embedding_weight(self) -> Tensor:
        embedding = self.lend()[1]
        return embedding.weight if isinstance(embedding, PackedEmbedding) else embedding

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input `[..., H]`."""
        return self.embed(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the scaled embedding `[..., H]`, in fp32 at least."""
        x, factor = self.embed_tokens(ids), self.config.embedding_scale
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x if factor == 1 else x * factor

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        """Return parameter name -> the HF tensor names that are concatenated along dim 0 to make it."""
        names = {name: name if name.startswith("lm_head") else f"model.{name}" for name, _ in self.named_parameters()}
        return {name: tuple(map(self.published_name, merged_parts(full))) for name, full in names.items()}
