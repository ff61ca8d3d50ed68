"""Phi-3 and Phi-4 (Phi3ForCausalLM): Mistral whose checkpoints hold merged projections, q, k, v and gate, up.

Some rotate only the first numbers of each head. With longrope (arXiv 2402.13753) frequencies have divisors, of which
there are two sets: for texts within the context of the first training, and beyond (`TargetConfig.within`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from models.config import RopeConfig, TargetConfig
from models.fields import Fields
from models.targets.mistral import MistralTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,  # of longrope, whatever its section states
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
PARTIAL = "partial_rotary_factor"
LONGROPE = ("longrope", "su", "yarn")  # the last two are its older names, in this family


class Phi3Target(MistralTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        rope = fields.take("rope_scaling", dict, {}) | fields.take("rope_parameters", dict, {})
        kind = rope.get("rope_type", rope.get("type"))
        factor = Fields({PARTIAL: rope.pop(PARTIAL, None) or config.get(PARTIAL)})
        plain = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        read = plain if kind in LONGROPE else rope
        base = super().read_config(DEFAULTS | config | {"rope_scaling": None, "rope_parameters": read})
        base = replace(base, rotary_dim=rotary_dim(factor, base.head_dim))
        frequencies = (base.rotary_dim or base.head_dim) // 2
        return with_longrope(base, Fields(rope | DEFAULTS | config), frequencies) if kind in LONGROPE else base

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        names = (name for name, _ in self.named_parameters())
        return {name: (name if name.startswith("lm_head") else f"model.{name}",) for name in names}


def rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """Read how many numbers of a head are rotated, None for all. Raises ValueError for an odd number of them."""
    factor = fields.positive(PARTIAL, 1.0)
    rotated = int(head_dim * factor)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(f"config.json: {PARTIAL}={factor}: must give an even number up to {head_dim} per head")
    return rotated if rotated < head_dim else None


def with_longrope(base: TargetConfig, fields: Fields, frequencies: int) -> TargetConfig:
    """Return a config with both rotary embeddings of longrope. Raises ValueError naming a key."""
    fields.only("short_mscale")
    fields.only("long_mscale")
    original = fields.size("original_max_position_embeddings", base.max_position_embeddings)
    stretch = max(fields.positive("factor", base.max_position_embeddings / original), 1.0)
    factor = fields.positive("attention_factor", math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))))
    parameters = ("attention_factor", factor), ("original_max_position_embeddings", original)
    ropes = []
    for key in ("short_factor", "long_factor"):
        divisors = fields.need(key, list)
        if len(divisors) != frequencies or any(
            type(each) not in (int, float) or not 0 < each < 1e9 for each in divisors
        ):
            raise ValueError(f"config.json: {key}={divisors!r}: must be {frequencies} positive numbers")
        ropes.append(RopeConfig(base.rope.theta, "longrope", parameters, tuple(map(float, divisors))))
    short, long = ropes
    if base.max_position_embeddings <= original:
        return replace(base, rope=short)
    return replace(base, rope=long, short_rope=short)
