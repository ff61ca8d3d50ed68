"""The sizes to enlarge to, and the places of old indices among the new ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor

from models.config import TargetConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama target and of the EAGLE-3 head that goes with it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    draft_vocab_size: int = 32000

    @property
    def layer_sizes(self) -> dict[str, int]:
        """The sizes of a decoder layer, under the names of TargetConfig."""
        keys = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        return {key: value for key, value in asdict(self).items() if key in keys}


SHAPES = {
    "llama3.1-8b": Shape(128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_word_embeddings=False),
    "llama3.2-1b": Shape(128256, 2048, 8192, 16, 32, 8, 64, 131072, tie_word_embeddings=True),
    "0.4b": Shape(32000, 1024, 4096, 24, 16, 8, 64, 4096, tie_word_embeddings=True, draft_vocab_size=8000),  # for CPUs
}
SIZES = tuple(item.name for item in fields(Shape) if item.type in (int, "int") and item.name != "draft_vocab_size")


def shape_of(text: str, old: TargetConfig) -> Shape:
    """Parse a name in SHAPES, or sizes that override those of `old`, as in intermediate_size=1792,num_layers=24.

    Raises ValueError for anything else.
    """
    if text in SHAPES:
        return SHAPES[text]
    sizes = {item.name: getattr(old, item.name) for item in fields(Shape) if item.name in SIZES}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in SIZES or not equals or not value.isdecimal():
            raise ValueError(
                f"--shape {text}: must be one of {', '.join(SHAPES)}, or sizes as key=number with commas between; "
                f"keys: {', '.join(SIZES)}"
            )
        sizes[key] = int(value)
    return Shape(**sizes, tie_word_embeddings=old.tie_word_embeddings)


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor: the place of each old index among `size` new ones."""

    size: int
    places: Tensor  # int64, distinct

    @classmethod
    def padded(cls, old: int, new: int, key: str) -> Axis:
        """Return the axis with the old indices first. Raises ValueError if `new` is smaller than `old`."""
        if new < old:
            raise ValueError(f"{key}={new}: smaller than the {old} of the model to enlarge")
        return cls(new, torch.arange(old))

    def then(self, other: Axis) -> Axis:
        """Return the concatenation of the two axes."""
        return Axis(self.size + other.size, torch.cat([self.places, self.size + other.places]))

    @property
    def is_new(self) -> Tensor:
        return torch.ones(self.size, dtype=torch.bool).index_fill_(0, self.places, False)


def heads(old: TargetConfig, new: TargetConfig) -> tuple[Axis, Axis]:
    """Return the axes of the query rows and of the key (or value) rows.

    Every query head keeps its KV head and every rotary pair its frequency: pair j of D rotates with theta^(-2j/D), so
    it becomes pair rj of rD. Raises ValueError for head counts or sizes that do not allow this.
    """
    group, wide = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    if new.num_kv_heads < old.num_kv_heads or wide < group:
        raise ValueError(
            f"num_heads={new.num_heads}, num_kv_heads={new.num_kv_heads}: no room for {old.num_kv_heads} KV heads "
            f"with {group} query heads each"
        )
    ratio, remainder = divmod(new.head_dim, old.head_dim)
    if remainder or not ratio:
        raise ValueError(f"head_dim={new.head_dim}: must be a multiple of {old.head_dim}, for the rotary frequencies")
    if ratio > 1 and old.rope.rope_type == "yarn":
        raise ValueError(f"head_dim={new.head_dim}: YaRN's frequencies hang on the head size; it must stay")
    pairs = ratio * torch.arange(old.head_dim // 2)
    within = torch.cat([pairs, new.head_dim // 2 + pairs])
    query = torch.arange(old.num_heads)
    query = query // group * wide + query % group
    kv = torch.arange(old.num_kv_heads)
    places = [(index[:, None] * new.head_dim + within).flatten() for index in (query, kv)]
    return Axis(new.num_heads * new.head_dim, places[0]), Axis(new.num_kv_heads * new.head_dim, places[1])


def layer_places(old: int, new: int) -> list[int]:
    """Return the new indices of the old layers; layers that add nothing are distributed evenly after them.

    Raises ValueError if `new` is smaller than `old`.
    """
    if new < old:
        raise ValueError(f"num_layers={new}: smaller than the {old} of the model to enlarge")
    return [index * new // old for index in range(old)]


def enlarged(old: TargetConfig, shape: Shape) -> TargetConfig:
    """Return the config of the enlarged target. Raises ValueError for a target that cannot be enlarged to `shape`."""
    if old.architecture != "LlamaForCausalLM" or old.attention_bias or old.mlp_bias:
        raise ValueError(f"{old.architecture}: only a Llama target without biases can be enlarged")
    if shape.tie_word_embeddings and not old.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=true: the model to enlarge has an LM head of its own")
    if shape.vocab_size > old.vocab_size and shape.hidden_size == old.hidden_size:
        raise ValueError(f"hidden_size={shape.hidden_size}: must grow too, or new token ids could not be kept down")
    if shape.max_position_embeddings < old.max_position_embeddings:
        raise ValueError(
            f"max_position_embeddings={shape.max_position_embeddings}: smaller than {old.max_position_embeddings}"
        )
    return replace(
        old,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        rms_norm_eps=old.rms_norm_eps * old.hidden_size / shape.hidden_size,  # as the mean of squares shrinks
        **shape.layer_sizes,
    )
