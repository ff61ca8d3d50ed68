"""Medusa as vLLM reads it: blocks.{head}.layers.{layer}.* and lm_heads.{head}.weight; Headway exports Medusa in it.

vLLM ignores names that it does not expect, so it silently loses a bias without medusa_fc_bias; here the two must agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from models.fields import MAX_LAYERS, Fields
from models.formats.checkpoint import (
    ConversionOptions,
    Format,
    ParsedConfig,
    Shapes,
    Verifier,
    write_with_base_model,
)
from models.heads.config import HeadShape
from models.heads.medusa.config import MedusaConfig

SHARED, FIRST = "lm_head.weight", "lm_heads.0.weight"


def matches(config: Mapping[str, Any], files: Collection[str]) -> bool:
    return config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]


def read(fields: Fields, shapes: Shapes, provided: ConversionOptions) -> ParsedConfig:
    notes: list[str] = []
    fields.only("model_type", "medusa")
    fields.only("architectures", ["MedusaModel"])
    fields.ignore("max_paths", "topk", "max_seq_len")
    name = fields.maybe("base_model_name_or_path", str)
    fields.only("logit_scale", 1.0, 1)
    vocab_size = fields.size("vocab_size")
    flags = {key: fields.maybe(key, bool) for key in ("original_lm_head", "medusa_fc_bias")}
    missing = [key for key, value in flags.items() if value is None]
    if missing:
        notes.append(f"not stated, so false: {', '.join(missing)}")
    config = MedusaConfig(
        vocab_size=vocab_size,
        target_hidden_size=fields.size("hidden_size"),
        num_heads=count(fields, "heads", "num_heads"),
        num_layers=count(fields, "layers", "num_hidden_layers"),
        draft_vocab_size=fields.size("truncated_vocab_size", vocab_size),
        shared=bool(flags["original_lm_head"]),
        bias=bool(flags["medusa_fc_bias"]),
    )
    tokens = fields.maybe("num_lookahead_tokens", int)
    return ParsedConfig(config, Verifier(name) if name else None, tokens, notes)


def count(fields: Fields, counted: str, key: str) -> int:
    """Read `key`, for which vLLM takes any key containing "num" and `counted`. Raises ValueError when there are two."""
    names = [name for name in fields.values if "num" in name and counted in name] or [key]
    if len(names) > 1:
        raise ValueError(f"config.json: {' and '.join(names)} are both taken for {key}; keep one")
    return fields.size(names[0], limit=MAX_LAYERS)


def incoming(tensors: dict[str, Tensor], config: HeadShape) -> dict[str, str]:
    token_map = tensors.get("token_map")
    if token_map is not None and token_map.dtype in (torch.int64, torch.int32) and token_map.numel():
        inside = int(token_map.min()) >= 0 and int(token_map.max()) < config.vocab_size
        if not inside or token_map.unique().numel() != token_map.numel():
            raise ValueError(f"token_map: must hold distinct tokens of the target's {config.vocab_size}")
    if not cast(MedusaConfig, config).shared or FIRST not in tensors:
        return {}
    if SHARED in tensors:
        raise ValueError(f"{SHARED} and {FIRST}: one LM head, doubled")
    tensors[SHARED] = tensors.pop(FIRST)
    return {SHARED: f"{FIRST} in the source"}


FORMAT = Format(
    name="vllm-medusa",
    heads=("medusa",),
    matches=matches,
    read=read,
    write=write_with_base_model,
    prefixes=("medusa_heads.",),
    blame=(
        (r"^blocks.*\.bias", ("medusa_fc_bias",)),
        (r"^blocks", ("num_heads", "num_hidden_layers", "hidden_size")),
        (r"^lm_head", ("original_lm_head", "num_heads", "truncated_vocab_size", "vocab_size", "hidden_size")),
        (r"^token_map", ("truncated_vocab_size", "vocab_size")),
    ),
    incoming=incoming,
)
