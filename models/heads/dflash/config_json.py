"""The config.json of block drafters in z-lab's flat form. Imports no torch."""

from __future__ import annotations

from typing import Any

from models.heads.dflash.config import DFlashConfig
from models.heads.layer_config import qwen3_json


def flat_json(config: DFlashConfig, architecture: str, **more: Any) -> dict[str, Any]:
    """Return z-lab's flat config.json: a Qwen3Config and a section, which `more` is added to.

    Raises ValueError for masks that have no key.
    """
    kinds = set(config.causal_layers)
    if len(kinds) > 1 and (config.causal(windowed=True), config.causal(windowed=False)) != ({True}, {False}):
        raise ValueError(
            "causal_layers: this format has one mask for all layers, or a causal one for those with a window"
        )
    return qwen3_json(config.layer) | {
        "architectures": [architecture],
        **({"is_causal": kinds.pop()} if len(kinds) == 1 else {}),
        "draft_vocab_size": config.draft_vocab_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [index - 1 for index in config.aux_layers],
            "sample_from_anchor": config.sample_from_anchor,
            **more,
        },
    }
