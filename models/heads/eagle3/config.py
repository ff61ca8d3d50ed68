"""EAGLE-3: the shape of a head and its config.json in the speculators format; options.

Readers disagree on the defaults of the norm flags, so each is written out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from models.checks import number
from models.config import TargetConfig
from models.heads.config import DecoderShape, Facts, NewHeadConfig
from models.heads.layer_config import (
    SIZES,
    check_draft_vocabulary,
    check_layer_ids,
    draft_vocabulary,
    head_layer,
    speculators_json,
    windowed_json,
)
from models.heads.objectives import TttConfig

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def check_norms(*, norm_before_fc: bool, fc_norm: bool) -> None:
    if norm_before_fc and fc_norm:
        raise ValueError("head.fc_norm=true: excludes head.norm_before_fc=true; set one of them to false")


@dataclass(frozen=True)
class Eagle3Config(DecoderShape):
    """`layer` holds the decoder layer's sizes; its num_layers counts the head's layers, its vocab_size is the target's.

    A window of W lets a slot see the last W slots up to itself, and a row drafted from it these and the rows between.
    `own_embedding`: the token embedding is stored with the head. Otherwise readers take the target's, which equals it.
    """

    name: ClassVar[str] = "eagle3"
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
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        check_norms(norm_before_fc=self.norm_before_fc, fc_norm=self.fc_norm)
        if not self.own_embedding and self.embed_requires_grad:
            raise ValueError("head.own_embedding=false: the head trains its embedding, which is then not the target's")

    def to_json(self, facts: Facts) -> dict[str, Any]:
        """Return the speculators config.json that vLLM reads, every flag written out."""
        layer = windowed_json(self.layer)
        shared = speculators_json(self, layer, facts, verifier_accept_k=1, accept_tolerance=0.0)
        return shared | {
            **{flag: getattr(self, flag) for flag in FLAGS},
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "num_aux_hidden_states": len(self.aux_layers),
            "target_hidden_size": self.target_hidden_size,
            "embed_requires_grad": self.embed_requires_grad,
            **({} if self.own_embedding else {"own_embedding": False}),
        }


@dataclass
class Eagle3Options(NewHeadConfig):
    objectives: ClassVar = {"ttt": TttConfig}
    fuses_layers: ClassVar = True
    files: ClassVar = "The files follow the `speculators` format, which vLLM reads as well."

    # at most this many draft tokens; null or more than the target has: all of them
    draft_vocab_size: int | None = number(None, low=1)
    num_layers: int | None = number(None, low=1)  # null: 1; p-eagle: 4, or 1 for a target of fewer than 24 layers
    hidden_size: int | None = number(None, low=1)  # null for these five: the target's
    intermediate_size: int | None = number(None, low=1)
    num_heads: int | None = number(None, low=1)
    num_kv_heads: int | None = number(None, low=1)
    head_dim: int | None = number(None, low=1)
    norm_before_residual: bool = False  # the residual is the normed fused state
    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # one norm per feature
    norm_output: bool = False  # feed the post-norm state back
    embed_requires_grad: bool | None = None  # train the token embedding; null: if its width is not the target's
    own_embedding: bool = True  # store the token embedding with the head; false: readers use the target's
    aux_layers: list[int] | None = None  # HF hidden_states indices, L before the final norm; null: (2, L//2, L-3)
    window: int | None = number(None, low=1)  # all layers see at most so many slots; null: all
    qk_norm: bool = False  # norm queries and keys of each attention head, as Qwen3's layers do

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norms(norm_before_fc=self.norm_before_fc, fc_norm=self.fc_norm)
        check_layer_ids(self.aux_layers)

    def for_target(self, target: TargetConfig) -> Eagle3Config:
        return Eagle3Config(**self.shape(target))

    def default_layers(self, target: TargetConfig) -> int:
        return 1

    def shape(self, target: TargetConfig) -> dict[str, Any]:
        """Return the fields of Eagle3Config: sizes and rotary embedding of the target's layers where none are set."""
        sizes = {key: getattr(self, key) for key in SIZES}
        sizes["num_layers"] = self.num_layers or self.default_layers(target)
        layer = head_layer(target, qk_norm=self.qk_norm, window=self.window, **sizes)
        aux = target.default_aux_layers if self.aux_layers is None else tuple(sorted(self.aux_layers))
        check_layer_ids(aux, target)
        other_width = layer.hidden_size != target.hidden_size
        if self.embed_requires_grad is False and other_width:
            raise ValueError("head.embed_requires_grad=false: needs a head of the target's hidden size; set it to null")
        return {
            "layer": layer,
            "draft_vocab_size": draft_vocabulary(self.draft_vocab_size, target),
            "aux_layers": aux,
            "target_hidden_size": target.hidden_size,
            **{flag: getattr(self, flag) for flag in FLAGS},
            "embed_requires_grad": other_width if self.embed_requires_grad is None else self.embed_requires_grad,
            "own_embedding": self.own_embedding,
        }
