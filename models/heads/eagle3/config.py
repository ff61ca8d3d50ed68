"""The shape of an EAGLE-3 head, and its config.json in the speculators format.

Readers disagree on the defaults of the norm flags, so each is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from models.config import TargetConfig
from models.heads.layer_config import SIZES, head_layer, layer_json

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config:
    """`layer` holds the decoder layer's sizes; its num_layers counts the head's layers, its vocab_size is the target's.

    `own_embedding`: the token embedding is stored with the head. Otherwise readers take the target's, which equals it.
    """

    algorithm: ClassVar[str] = "eagle3"
    speculator: ClassVar[str] = "Eagle3Speculator"

    layer: TargetConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False
    own_embedding: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(
                f"head.draft_vocab_size={self.draft_vocab_size}: must be 1 to the target's {self.layer.vocab_size}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("head.fc_norm=true: excludes head.norm_before_fc=true")
        if not self.own_embedding and self.embed_requires_grad:
            raise ValueError("head.own_embedding=false: the head trains its embedding, which is then not the target's")

    @classmethod
    def default_layers(cls, target: TargetConfig) -> int:
        return 1

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def max_depth(self) -> int | None:
        return None

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        draft_vocab_size: int | None = None,
        aux_layers: Sequence[int] | None = None,
        num_layers: int | None = None,
        embed_requires_grad: bool | None = None,
        **options: Any,
    ) -> Self:
        """Return the config of a head shaped like the target's layers, except for the sizes (SIZES) given.

        `draft_vocab_size` None or too large means all of V; `embed_requires_grad` None: true only if the head's width
        differs from the target's, whose embedding then cannot be used.
        """
        sizes = {key: options.pop(key) for key in SIZES if key in options}
        layer = head_layer(target, num_layers=num_layers or cls.default_layers(target), **sizes)
        size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
        aux = tuple(sorted(aux_layers)) if aux_layers is not None else target.default_aux_layers
        if any(not 0 <= layer_id < target.num_layers for layer_id in aux):
            raise ValueError(f"head.aux_layers={list(aux)}: ids of this target are 0..{target.num_layers - 1}")
        other_width = layer.hidden_size != target.hidden_size
        if embed_requires_grad is False and other_width:
            raise ValueError("head.embed_requires_grad=false: needs a head of the target's hidden size; set it to null")
        trained = other_width if embed_requires_grad is None else embed_requires_grad
        return cls(layer, size, aux, target.hidden_size, embed_requires_grad=trained, **options)

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        """Return the speculators config.json that vLLM reads, every flag written out."""
        return {
            "architectures": [self.speculator],
            "speculators_model_type": self.algorithm,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": self.algorithm,
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
            "transformer_layer_config": layer_json(self.layer),
            "draft_vocab_size": self.draft_vocab_size,
            **{flag: getattr(self, flag) for flag in FLAGS},
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "num_aux_hidden_states": len(self.aux_layers),
            "target_hidden_size": self.target_hidden_size,
            "embed_requires_grad": self.embed_requires_grad,
            **({} if self.own_embedding else {"own_embedding": False}),
        }
