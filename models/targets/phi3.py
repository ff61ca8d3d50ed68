"""Phi-3 and Phi-4 (Phi3ForCausalLM): Mistral whose checkpoints hold merged projections, q, k, v and gate, up.

Some rotate only the first numbers of each head. longrope, whose frequencies change with the length of the text, is
refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.fields import Fields
from models.targets.mistral import MistralTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
LONGROPE = ("longrope", "su", "yarn")  # the last two are its older names, in this family


class Phi3Target(MistralTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        rope = fields.take("rope_scaling", dict, {}) | fields.take("rope_parameters", dict, {})
        kind = rope.get("rope_type", rope.get("type"))
        if kind in LONGROPE:
            raise ValueError(
                f"config.json: rope_type={kind!r}: longrope is not supported, whose frequencies change with the length "
                "of the text; use a checkpoint without it, such as microsoft/phi-4 or microsoft/Phi-3-mini-4k-instruct"
            )
        key = "partial_rotary_factor"
        factor = Fields({key: rope.pop(key, None) or config.get(key)}).positive(key, 1.0)
        base = super().read_config(DEFAULTS | config | {"rope_scaling": None, "rope_parameters": rope})
        rotated = int(base.head_dim * factor)
        if rotated % 2 or not 0 < rotated <= base.head_dim:
            raise ValueError(f"config.json: {key}={factor}: must give an even number up to {base.head_dim} per head")
        return replace(base, rotary_dim=rotated if rotated < base.head_dim else None)

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        names = (name for name, _ in self.named_parameters())
        return {name: (name if name.startswith("lm_head") else f"model.{name}",) for name in names}
