"""OPT (OPTForCausalLM, arXiv 2205.01068): learned positions with two unused rows, ReLU.

OPT-350M alone has its norms after attention and MLP, and an embedding of half the hidden size between two projections.
In that layout the last layer's second norm is the target's final norm. llama.cpp has no such architecture, so there are
no GGUF files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts
from models.attention import Attention
from models.config import TargetConfig
from models.decoder import DecoderLayer
from models.layers import Embedding, Linear, PackedEmbedding, RMSNorm, make_lm_head
from models.targets.learned import LearnedLayer, LearnedTarget, read_learned

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2}
ONLY = {"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}


class PostNormLayer(LearnedLayer):
    """A layer whose norms follow attention and MLP. The second norm of the last one belongs to the target."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.is_last = layer == config.num_layers - 1
        self.input_layernorm.inside = self.post_attention_layernorm.inside = True
        if self.is_last:
            del self.post_attention_layernorm

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        dtype = self.input_layernorm.weight.dtype
        x = self.input_layernorm(self.self_attn(x.to(dtype), rotary, attention, x))
        x = self.mlp(x.to(dtype), x)
        return x if self.is_last else self.post_attention_layernorm(x)

    @property
    def forward_norm(self) -> RMSNorm:
        return self.input_layernorm

    def parts(self) -> LayerParts | None:
        return None


class OPTTarget(LearnedTarget):
    offset = 2
    root = "model.decoder."
    in_layer: ClassVar = {
        "self_attn.o_proj": "self_attn.out_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }
    outside: ClassVar = {"norm": "final_layer_norm"}

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config)
        self.project_in = self.project_out = None
        if (size := config.embedding_size) is not None:
            self.embed_tokens, self.lm_head = Embedding(config.vocab_size, size), make_lm_head(size, config.vocab_size)
            self.project_in = Linear(size, config.hidden_size, bias=False)
            self.project_in.out_dtype = torch.float32
            self.project_out = Linear(config.hidden_size, size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | config
        for key, value in ONLY.items():
            if config.get(key, value) != value:
                raise ValueError(f"config.json: {key}={config[key]!r}: only {value!r} is supported")
        base = read_learned(config, {"ffn_dim": "intermediate_size"}, ("relu",))
        biased = bool(config.get("enable_bias", True))
        size = config.get("word_embed_proj_dim") or base.hidden_size
        if type(size) is not int or size < 1:
            raise ValueError(f"config.json: word_embed_proj_dim={size!r}: must be a whole number, at least 1")
        return replace(
            base,
            rms_norm_eps=1e-5,
            attention_bias=biased,
            output_bias=biased,
            mlp_bias=biased,
            embedding_size=None if size == base.hidden_size else size,
            norm_after=not config.get("do_layer_norm_before", True),
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> DecoderLayer:
        return (PostNormLayer if config.norm_after else LearnedLayer)(config, index)

    def lend(self) -> tuple[Linear, Tensor | PackedEmbedding]:
        """As of others, with each table multiplied by its projection. Raises ValueError where one is not at hand."""
        if self.project_in is None or self.project_out is None:
            return super().lend()
        linears, table = (self.lm_head, self.project_out, self.project_in), self.embed_tokens.weight
        parts = [weight.float() for linear in linears if (weight := linear.unpacked_weight()) is not None]
        if len(parts) < len(linears) or len(parts[0]) < len(table):
            raise ValueError(
                "model=: heads need LM head and embedding through their projections (word_embed_proj_dim), which "
                "engine.tensor_parallel= divides, or a quantization rounds; use neither, or another proposer"
            )
        rows, out, into = parts
        lm_head = make_lm_head(self.config.hidden_size, len(rows), device="meta")
        lm_head.weight = nn.Parameter((rows @ out).to(table.dtype), requires_grad=False)
        return lm_head, (table.float() @ into.T).to(table.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) if self.project_in is None else self.project_in(self.embed_tokens(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden if self.project_out is None else self.project_out(hidden))

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        layout = super().checkpoint_layout()
        if self.config.norm_after:
            last = f"{self.root}layers.{self.config.num_layers - 1}.final_layer_norm"
            layout |= {f"norm.{kind}": (f"{last}.{kind}",) for kind in ("weight", "bias")}
        return layout
