"""The schemas of `head=`: which head serves or is trained, and the shape of a new one.

The head's own config in models/heads documents what a shape means; here are the keys that a user sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from infer.config_checks import at_least, resolve_path

AUTO = "auto"


@dataclass
class HeadConfig:
    """Keys that all heads share; the option `none` is exactly this with name "none"."""

    name: str = MISSING
    path: str | None = None  # an exported head; null: looked up by infer/options/exported_heads.py
    allow_mismatch: bool = False  # load a head even if it was trained for another target

    @property
    def max_depth(self) -> int | None:
        """Maximum tokens that a new head with these settings can draft; None: no bound."""
        return None

    def folder(self, output_dir: str, model_name: str) -> Path:
        """Return where training exports the head of this model; `path` overrides.

        infer/options/exported_heads.py looks up which head to load.
        """
        return resolve_path(self.path) if self.path else resolve_path(output_dir) / "heads" / model_name / self.name


@dataclass
class NoHeadConfig(HeadConfig):
    def __post_init__(self) -> None:
        if self.path:
            raise ValueError(f"head.path={self.path}: head=none reads no head; drop head.path or say head=eagle3")


@dataclass
class AutoHeadConfig(HeadConfig):
    """The head is chosen from the existing ones by `infer.options.exported_heads.choose_head`."""


@dataclass
class NewHeadConfig(HeadConfig):
    """Hyper-parameters of a new head; an exported head brings its own in its config.json."""

    init_from_target: bool = True  # initialise from the target's weights where the head can hold them
    start_from: str | None = None  # an exported head of the same shape: training continues from its weights


@dataclass
class EagleHeadConfig(NewHeadConfig):
    bias: bool = False  # bias of fc; SafeAILab's heads for Llama 2 and Vicuna have one, vLLM reads none
    own_embedding: bool = True  # store the token embedding with the head; false: use the target's


@dataclass
class Eagle3HeadConfig(NewHeadConfig):
    draft_vocab_size: int | None = None  # at most this many draft tokens; null or more than the target has: all of them
    num_layers: int | None = None  # null: 1; p-eagle: 4, or 1 for a target of fewer than 24 layers
    hidden_size: int | None = None  # null for these five: the target's
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_before_residual: bool = False  # the residual is the normed fused state
    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # one norm per feature
    norm_output: bool = False  # feed the post-norm state back
    embed_requires_grad: bool | None = None  # train the token embedding; null: if its width is not the target's
    own_embedding: bool = True  # store the token embedding with the head; false: readers use the target's
    aux_layers: list[int] | None = None  # HF hidden_states indices; null: (2, L//2, L-3)

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            at_least(f"head.{key}", getattr(self, key), 1)
        at_least("head.draft_vocab_size", self.draft_vocab_size, 1)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("head.fc_norm=true: excludes head.norm_before_fc=true; set one of them to false")
        if self.aux_layers is not None and (
            not self.aux_layers or min(self.aux_layers) < 0 or len(set(self.aux_layers)) < len(self.aux_layers)
        ):
            raise ValueError(f"head.aux_layers={self.aux_layers}: must be distinct layer ids from 0, or null")


@dataclass
class PEagleHeadConfig(Eagle3HeadConfig):
    embed_requires_grad: bool | None = True
    num_depths: int = 8  # tokens drafted in one forward
    mask_token_id: int | None = None  # placeholder for tokens not known yet; null: the end-of-text token

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("head.num_depths", self.num_depths, 1)

    @property
    def max_depth(self) -> int:
        return self.num_depths


@dataclass
class MedusaHeadConfig(NewHeadConfig):
    num_heads: int = 4
    num_layers: int = 1  # residual layers of each head
    draft_vocab_size: int | None = None  # at most this many draft tokens; null or more than the target has: all of them
    shared: bool = False  # all heads read one frozen copy of the target's LM head; false: each trains its own
    bias: bool = True  # of the residual layers

    def __post_init__(self) -> None:
        for key in ("num_heads", "num_layers", "draft_vocab_size"):
            at_least(f"head.{key}", getattr(self, key), 1)

    @property
    def max_depth(self) -> int:
        return self.num_heads


@dataclass
class MlpHeadConfig(NewHeadConfig):
    init_from_target: bool = False
    n_predict: int = 4  # heads
    inner_dim: int | None = None  # width of the state; null: the target's
    tie_weights: bool = False  # one embedding, norm and LM head for all heads, one projection after the first
    scale_input: bool = False  # norm the target's hidden state first
    top_k_tokens_per_head: list[int] | None = None  # recorded for IBM's engine; null: 5, 4, 3, 2, 1, 1, ...
    n_candidates: int = 5  # also recorded for IBM's engine

    def __post_init__(self) -> None:
        for key in ("n_predict", "inner_dim", "n_candidates"):
            at_least(f"head.{key}", getattr(self, key), 1)
        for count in self.top_k_tokens_per_head or ():
            at_least("head.top_k_tokens_per_head", count, 1)
        if self.init_from_target:
            raise ValueError("head.init_from_target=true: an MLP speculator has no place for the target's weights")

    @property
    def max_depth(self) -> int:
        return self.n_predict


HEADS: dict[str, type] = {
    "eagle": EagleHeadConfig,
    "eagle3": Eagle3HeadConfig,
    "medusa": MedusaHeadConfig,
    "mlp": MlpHeadConfig,
    "p-eagle": PEagleHeadConfig,
    "none": NoHeadConfig,
    AUTO: AutoHeadConfig,
}
HEAD_NAMES = tuple(name for name, schema in HEADS.items() if issubclass(schema, NewHeadConfig))
