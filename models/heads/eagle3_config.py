"""The shape of an EAGLE-3 head, and its config.json in the speculators format.

Readers disagree on the defaults of the norm flags, so each is written out and each must be there to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.config import TargetConfig

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config:
    """`layer` holds the decoder layer's sizes; its num_layers counts the head's, its vocab_size is the target's."""

    layer: TargetConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(
                f"head.draft_vocab_size={self.draft_vocab_size}: must be 1 to the target's {self.layer.vocab_size}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("head.fc_norm=true: excludes head.norm_before_fc=true")

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        draft_vocab_size: int | None = None,
        aux_layers: Sequence[int] | None = None,
        num_layers: int = 1,
        **flags: bool,
    ) -> Eagle3Config:
        """A head shaped like one of the target's own layers; `draft_vocab_size` None or too large means all of V."""
        layer = replace(  # a Llama layer, whatever family the target is of
            target,
            architecture="LlamaForCausalLM",
            num_layers=num_layers,
            tie_word_embeddings=False,
            attention_bias=target.output_bias,  # Llama has it on both projections or on none
            qk_norm=False,
            windows=(),
            experts=None,
        )
        size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
        aux = tuple(sorted(aux_layers)) if aux_layers is not None else target.default_aux_layers
        if any(not 0 <= layer_id < target.num_layers for layer_id in aux):
            raise ValueError(f"head.aux_layers={list(aux)}: ids of this target are 0..{target.num_layers - 1}")
        return cls(layer, size, aux, target.hidden_size, **flags)

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Eagle3Config:
        """Reads the speculators format, with every flag it must state. Raises ValueError naming the key."""
        if config.get("speculators_model_type") != "eagle3":
            raise ValueError(
                f"config.json: speculators_model_type={config.get('speculators_model_type')!r}: expected 'eagle3'"
            )
        for key in (*FLAGS, "transformer_layer_config", "draft_vocab_size"):
            if key not in config:
                raise ValueError(f"config.json: {key} is missing; readers differ on its default, so it must be stated")
        layer = dict(config["transformer_layer_config"])
        layer.setdefault("architectures", ["LlamaForCausalLM"])
        parsed = TargetConfig.from_json(layer)
        nested = config.get("eagle_config") or {}
        aux = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        if not aux:
            raise ValueError("config.json: eagle_aux_hidden_state_layer_ids is missing")
        return cls(
            layer=replace(parsed, tie_word_embeddings=False),
            draft_vocab_size=config["draft_vocab_size"],
            aux_layers=tuple(aux),
            target_hidden_size=config.get("target_hidden_size") or parsed.hidden_size,
            **{flag: bool(config[flag]) for flag in FLAGS},
        )

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        """The speculators config.json that vLLM reads, every flag written out."""
        layer = self.layer
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": speculative_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
            },
            "transformer_layer_config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": layer.vocab_size,
                "hidden_size": layer.hidden_size,
                "intermediate_size": layer.intermediate_size,
                "num_hidden_layers": layer.num_layers,
                "num_attention_heads": layer.num_heads,
                "num_key_value_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": layer.rms_norm_eps,
                "max_position_embeddings": layer.max_position_embeddings,
                "rope_theta": layer.rope.theta,
                "rope_scaling": None
                if layer.rope.rope_type == "default"
                else {key: value for key, value in layer.rope.to_json().items() if key != "rope_theta"},
                "attention_bias": layer.attention_bias,
                "mlp_bias": layer.mlp_bias,
                "tie_word_embeddings": False,
                "bos_token_id": layer.bos_token_id,
                "eos_token_id": list(layer.eos_token_ids) or None,
            },
            "draft_vocab_size": self.draft_vocab_size,
            **{flag: getattr(self, flag) for flag in FLAGS},
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "num_aux_hidden_states": len(self.aux_layers),
            "target_hidden_size": self.target_hidden_size,
            "embed_requires_grad": False,
        }
