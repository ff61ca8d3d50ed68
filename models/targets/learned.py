"""What OPT and GPT-BigCode share: learned positions, layer norms with a bias, an MLP of two layers, biases everywhere.

A position's vector is added to the token's embedding, so a context is as long as the table. Heads have Llama's layers
with a rotary embedding of the default base, as for any other target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor

from kernels.elementwise import Activation
from models.config import TargetConfig
from models.decoder import DecoderLayer
from models.layers import Embedding, LayerNorm, PlainMLP
from models.targets.llama import LlamaTarget
from models.targets.tying import LM_HEAD
from models.weights import merged_parts

# Keys of a config.json that the families share under the names of Llama's
SHARED = (
    "architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config",
)  # fmt: skip
NAME = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)|(.+)\.(\w+)")


def read_learned(
    config: Mapping[str, Any], renamed: Mapping[str, str], activations: tuple[Activation, ...]
) -> TargetConfig:
    """Read a config.json that names `intermediate_size` and other keys otherwise, by `renamed`: its key -> Llama's.

    Raises ValueError as `TargetConfig.from_json`, and for an activation function that is none of `activations`.
    """
    activation = config.get("activation_function", activations[0])
    if activation not in activations:
        names = " or ".join(map(repr, activations))
        raise ValueError(f"config.json: activation_function={activation!r}: only {names} is supported")
    stated = {key: config[key] for key in SHARED if key in config}
    stated |= {name: config[key] for key, name in renamed.items() if config.get(key) is not None}
    base = TargetConfig.from_json(stated | {"hidden_act": activation}, activation=activation)
    if base.hidden_size % base.num_heads:
        raise ValueError(f"config.json: hidden_size={base.hidden_size} is no multiple of {base.num_heads} heads")
    return replace(base, learned_positions=True, unrotated=True)


class LearnedLayer(DecoderLayer):
    def __init__(self, config: TargetConfig, layer: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        activation = cast(Activation, config.activation)
        super().__init__(
            config, layer, PlainMLP(size, config.intermediate_size, activation=activation, bias=config.mlp_bias)
        )
        self.input_layernorm = LayerNorm(size, eps)
        self.post_attention_layernorm = LayerNorm(size, eps)


class LearnedTarget(LlamaTarget):
    offset: ClassVar[int] = 0  # rows of the table before the one of position 0
    root: ClassVar[str]  # prefix of the names of a checkpoint's tensors
    layer_list: ClassVar[str] = "layers"
    in_layer: ClassVar[Mapping[str, str]]  # our modules of a layer -> the checkpoint's
    outside: ClassVar[Mapping[str, str]]  # those outside the layers

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config)
        self.embed_positions = Embedding(config.max_position_embeddings + self.offset, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> DecoderLayer:
        return LearnedLayer(config, index)

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed(ids) + self.embed_positions(positions + self.offset)

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        return {name: self._source(name) for name, _ in self.named_parameters()}

    def _source(self, name: str) -> tuple[str, ...]:
        if name == LM_HEAD:
            return (LM_HEAD,)
        match = NAME.fullmatch(name)
        assert match is not None
        layer, inside, kind, module, other_kind = match.groups()
        if layer is None:
            return (f"{self.root}{self.outside.get(module, module)}.{other_kind}",)
        return merged_parts(f"{self.root}{self.layer_list}.{layer}.{self.in_layer.get(inside, inside)}.{kind}")
